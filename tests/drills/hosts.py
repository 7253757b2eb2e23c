"""Hosts of a drill: network namespaces with two networks between them, on which packets can really be lost.

One network is for the coordinator (`CONTROL`), the other for links between workers (`DATA`), so that a host can be
parted from either or from both. Everything lies in namespaces with a random name: the host that the drills run on sees
nothing of it, and removing them removes all.
"""

from __future__ import annotations

import atexit
import itertools
import secrets
import subprocess
from collections.abc import Iterable

CONTROL, DATA = "control", "data"
NETWORKS = (CONTROL, DATA)
_SECONDS = 10.0  # for one command
_NOBODY = "02:00:00:00:00:ff"  # a hardware address at which nobody listens


class NotPermitted(Exception):
    """This machine does not let us make hosts; says why."""


class Hosts:
    """Hosts 0, 1, … on a switch, each in a namespace of its own.

    Hardware addresses are fixed instead of asked for, so that a packet can be lost in one direction alone: it is sent
    to an address that nobody has.

    Args:
        prefix: the first two numbers of all addresses.
        mark: with which all names begin; '': one that nobody else has.

    Raises:
        NotPermitted: it takes root, CAP_NET_ADMIN, and iproute2.
    """

    def __init__(self, count: int, prefix: str = "10.77", mark: str = "") -> None:
        mark = mark or f"cd{secrets.token_hex(3)}"
        self._prefix = prefix
        self._switch = f"{mark}-switch"
        self._names = [f"{mark}-host{number}" for number in range(count)]
        self._closed = False
        atexit.register(self.close)
        try:
            self._build()
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            said = getattr(error, "stderr", "") or str(error)
            raise NotPermitted(f"network namespaces are not to be had here: {said.strip()}") from None
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        for name in (self._switch, *self._names):
            _ip("netns", "add", name)
        for network in NETWORKS:
            _ip("-n", self._switch, "link", "add", network, "type", "bridge")
            _ip("-n", self._switch, "link", "set", network, "up")
        for host, name in enumerate(self._names):
            _ip("-n", name, "link", "set", "lo", "up")
            for network in NETWORKS:
                port = _port(host, network)
                end = ("name", network, "address", _hardware(host, network), "netns", name)
                _ip("link", "add", port, "netns", self._switch, "type", "veth", "peer", *end)
                _ip("-n", self._switch, "link", "set", port, "master", network, "up")
                _ip("-n", name, "addr", "add", f"{self.address(host, network)}/24", "dev", network)
                _ip("-n", name, "link", "set", network, "up")
        for one, other in itertools.permutations(range(len(self._names)), 2):
            self._reach(one, other, NETWORKS)

    def inside(self, host: int) -> tuple[str, ...]:
        """What to put before a command that is to run there."""
        return "ip", "netns", "exec", self._names[host]

    def address(self, host: int, network: str) -> str:
        return f"{self._prefix}.{NETWORKS.index(network)}.{host + 1}"

    # What is done to them

    def part(self, host: int, networks: Iterable[str] = NETWORKS) -> None:
        """Pulls its cables: no packet comes or goes."""
        for network in networks:
            _ip("-n", self._switch, "link", "set", _port(host, network), "down")

    def lose_sent(self, host: int, networks: Iterable[str] = NETWORKS) -> None:
        """What it sends is lost; what is sent to it arrives."""
        for other in self._others(host):
            self._reach(host, other, networks, _NOBODY)

    def lose_received(self, host: int, networks: Iterable[str] = NETWORKS) -> None:
        """What is sent to it is lost; what it sends arrives."""
        for other in self._others(host):
            self._reach(other, host, networks, _NOBODY)

    def heal(self, host: int) -> None:
        """As if nothing had been."""
        for network in NETWORKS:
            _ip("-n", self._switch, "link", "set", _port(host, network), "up")
        for other in self._others(host):
            self._reach(host, other, NETWORKS)
            self._reach(other, host, NETWORKS)

    def close(self) -> None:
        """Removes everything; also after a failure in the middle of making it."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for name in (*self._names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_SECONDS, check=False)

    def _others(self, host: int) -> list[int]:
        return [other for other in range(len(self._names)) if other != host]

    def _reach(self, one: int, other: int, networks: Iterable[str], hardware: str = "") -> None:
        """From one host to the other packets go to this hardware address, or to the right one."""
        for network in networks:
            where = (self.address(other, network), "lladdr", hardware or _hardware(other, network), "dev", network)
            _ip("-n", self._names[one], "neigh", "replace", *where, "nud", "permanent")


def _port(host: int, network: str) -> str:
    return f"{network}{host}"


def _hardware(host: int, network: str) -> str:
    return f"02:00:00:00:{NETWORKS.index(network):02x}:{host + 1:02x}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=_SECONDS)
