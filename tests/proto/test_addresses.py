"""Addresses: every program takes and refuses the same ones."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from collectived_proto.addresses import parse_address, parse_http_address, probe_address


@pytest.mark.parametrize(
    ("text", "address"),
    [("a:0", ("a", 0)), ("[::1]:80", ("::1", 80)), (":65535", ("", 65535))],
)
def test_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "80", "host", "host:", "host:x", "host:²", "host:٣", "host:65536", "host:-1", "host: 1"]
)
def test_what_is_no_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no address: expected host:port"):
        parse_address(text)


def test_a_probe_reaches_whoever_listens_and_nobody_else(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        probe_address(address, 5)
    with pytest.raises(OSError):
        probe_address(address, 5)
    with pytest.raises(FileNotFoundError):
        probe_address(f"unix:{tmp_path}/nobody", 5)
    with pytest.raises(ValueError, match="'nowhere' is no address"):
        probe_address("nowhere", 5)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:80", ("::1", 80)),
        ("train1.example:65535", ("train1.example", 65535)),
    ],
)
def test_addresses_for_http(text: str, address: tuple[str, int]) -> None:
    assert parse_http_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "x", ":80", "[]:80", "localhost:", "host:x", "65536", "1:70000", "-1", "٣", "http://localhost:80/"]
)
def test_what_is_no_address_for_http_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no \[HOST:\]PORT: expected PORT or HOST:PORT"):
        parse_http_address(text)
