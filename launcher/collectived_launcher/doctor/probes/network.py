"""Interfaces, the way out, and the processes that listen on the default ports.

Nothing is sent, and nothing is bound.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from collectived_launcher.doctor.facts import InterfaceFacts, NetworkFacts, Port

PORTS = {  # the defaults; a job of `collectived launch` takes ports that are free
    7450: "coordinator",
    7451: "worker (gRPC)",
    7452: "worker (links)",
    9450: "metrics of the coordinator",
    9451: "metrics of a worker",
}
# Addresses for documentation, at which there is no host.
_OUTSIDE_ADDRESSES = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
_DISCARD = 9
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_LISTENING = "0A"


def probe_network(environment: Mapping[str, str]) -> NetworkFacts:
    """SSH_CONNECTION of the environment has the address at which a user came in by ssh."""
    reached = environment.get("SSH_CONNECTION", "").split()
    return NetworkFacts(
        hostname=socket.gethostname(),
        interfaces=tuple(list_interfaces()),
        outward=next(
            (found for where, family in _OUTSIDE_ADDRESSES if (found := find_source_address(where, family))), ""
        ),
        reached_at=reached[2] if len(reached) == 4 else "",
    )


def list_interfaces() -> Iterator[InterfaceFacts]:
    """Those that are up and have an address that means something beyond one link, IPv4 first."""
    names = [name for _, name in socket.if_nameindex() if _is_up(name)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in names:
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", os.fsencode(name)[:15]))
                yield InterfaceFacts(name, socket.inet_ntoa(answer[20:24]), _read_speed(name))
    for line in _read_lines("/proc/net/if_inet6"):
        digits, _, _, _, _, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if name in names and not address.is_link_local:
            yield InterfaceFacts(name, str(address), _read_speed(name))


def find_interface(address: str) -> InterfaceFacts | None:
    """The interface that has this address."""
    return next((interface for interface in list_interfaces() if interface.address == address), None)


def find_source_address(host: str, family: int) -> str:
    """The address from which packets to `host` (a numeric address) leave; '' where no route is known."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD))
        return str(probe.getsockname()[0])
    return ""


def _is_up(name: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(int(Path(f"/sys/class/net/{name}/flags").read_text(), 16) & 1)
    return False


def _read_speed(name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # virtual ones do not say, or say -1
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
        return speed if speed > 0 else None
    return None


def probe_ports(wanted: Mapping[int, str] = PORTS) -> tuple[Port, ...]:
    held = {port: inode for port, inode in _list_listeners() if port in wanted}
    owners = _find_owners(set(held.values())) if held else {}
    found = []
    for number, used_for in wanted.items():
        holder = _describe_process(owners.get(held[number])) if number in held else None
        found.append(Port(number, used_for, holder, "collectived" in (holder or "")))
    return tuple(found)


def _list_listeners() -> Iterator[tuple[int, str]]:
    """(port, inode) of every TCP socket of this network that listens."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _read_lines(table)[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                yield int(fields[1].rpartition(":")[2], 16), fields[9]


def _find_owners(inodes: set[str]) -> dict[str, int]:
    """The process of each socket, where we may see it."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[str, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process of another user, or gone
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if inode := wanted.get(os.readlink(descriptor)):
                        found[inode] = int(process.name)
    return found


def _describe_process(pid: int | None) -> str:
    if pid is None:
        return ""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return f"pid {pid}"
    command = " ".join(word.decode(errors="replace") for word in words if word)
    return f"pid {pid}: {command if len(command) <= 80 else command[:79] + '…'}"


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
