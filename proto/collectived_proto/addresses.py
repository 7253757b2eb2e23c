"""Addresses as people and processes write them: `unix:/path`, `host:port`, and `[HOST:]PORT` for HTTP."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


def parse_address(text: str) -> tuple[str, int]:
    """Parse `host:port`; the host is '' where none stands before the colon.

    Raises:
        ValueError: it is no such address.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ValueError(f"{text!r} is no address: expected host:port, such as 10.0.0.2:7459")
    return host.strip("[]"), int(port)


def parse_http_address(text: str) -> tuple[str, int]:
    """Parse `[HOST:]PORT`; without a host the loopback.

    Raises:
        ValueError: it is no such address.
    """
    try:
        host, port = parse_address(text if ":" in text else f"{LOOPBACK}:{text}")
    except ValueError:
        host = ""
    if not host:
        raise ValueError(f"{text!r} is no [HOST:]PORT: expected PORT or HOST:PORT, such as 8080 or 0.0.0.0:8080")
    return host, port


def unix_path(address: str) -> str:
    """Return the path of a Unix socket's address; '' for TCP."""
    return address.removeprefix("unix:").removeprefix("//") if address.startswith("unix:") else ""


def probe_address(address: str, timeout: float) -> None:
    """Connect and hang up, which takes no time where gRPC would try again and again.

    Raises:
        OSError: no process listens there.
        ValueError: it is no address.
    """
    if path := unix_path(address):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(timeout)
            sock.connect(path)
    else:
        host, port = parse_address(address)
        if not host:
            raise ValueError(f"{address!r} has no host: expected unix:/path or host:port")
        socket.create_connection((host, port), timeout).close()
