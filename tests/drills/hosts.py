"""Hosts of a drill: network namespaces with two networks between them, on which packets can really be lost.

One network is for the coordinator (`CONTROL`), the other for links between workers (`DATA`), so that a host can be
parted from either or from both. Namespaces have a random name, and removing them removes all.
"""

from __future__ import annotations

import atexit
import secrets
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from tests.drills.switch import CALM, Switch, Weather, open_tun

CONTROL, DATA = "control", "data"
NETWORKS = (CONTROL, DATA)
_SECONDS = 10.0  # for one command
_PACKET_BYTES = 9000  # the most that a packet may have


class NotPermitted(Exception):
    """This machine does not let us make hosts; says why."""


class Hosts:
    """Hosts 0, 1, … each in a namespace of its own, with a switch for each network.

    Args:
        prefix: the first two numbers of all addresses.
        mark: with which all names begin; '': one that nobody else has.

    Raises:
        NotPermitted: it takes root, CAP_NET_ADMIN, /dev/net/tun and iproute2.
    """

    def __init__(self, count: int, prefix: str = "10.77", mark: str = "") -> None:
        mark = mark or f"cd{secrets.token_hex(3)}"
        self._prefix = prefix
        self._mark = mark
        self._names = [f"{mark}-host{number}" for number in range(count)]
        self._switches = {network: Switch() for network in NETWORKS}
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
        for host, name in enumerate(self._names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            for network in NETWORKS:
                made = f"{self._mark}{network[0]}{host}"
                address = self.address(host, network)
                self._switches[network].add(host, open_tun(made), address)
                _ip("link", "set", made, "netns", name, "name", network)
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", network)
                _ip("-n", name, "link", "set", network, "mtu", str(_PACKET_BYTES), "up")
        for switch in self._switches.values():
            switch.start()

    def inside(self, host: int) -> tuple[str, ...]:
        """What to put before a command that is to run there."""
        return "ip", "netns", "exec", self._names[host]

    def address(self, host: int, network: str) -> str:
        return f"{self._prefix}.{NETWORKS.index(network)}.{host + 1}"

    # What is done to them

    def part(self, host: int, networks: Iterable[str] = NETWORKS) -> None:
        """Pulls its cables: no packet comes or goes."""
        self.lose_sent(host, networks)
        self.lose_received(host, networks)

    def lose_sent(self, host: int, networks: Iterable[str] = NETWORKS) -> None:
        """What it sends is lost; what is sent to it arrives."""
        for network in networks:
            self._switches[network].mute.add(host)

    def lose_received(self, host: int, networks: Iterable[str] = NETWORKS) -> None:
        """What is sent to it is lost; what it sends arrives."""
        for network in networks:
            self._switches[network].deaf.add(host)

    def impair(self, weather: Weather, network: str = DATA) -> None:
        """Loses and delays packets of a network, whosesoever they are."""
        self._switches[network].weather = weather

    def heal(self, *hosts: int) -> None:
        """As if nothing had been, for these hosts and for the networks."""
        for switch in self._switches.values():
            switch.weather = CALM
            switch.mute.difference_update(hosts)
            switch.deaf.difference_update(hosts)

    def close(self) -> None:
        """Removes everything; also after a failure in the middle of making it."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for switch in self._switches.values():
            switch.close()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=_SECONDS, check=False)


@contextmanager
def hosts_or_skip(count: int) -> Iterator[Hosts]:
    """Hosts for a test, which is skipped where they are not to be had."""
    try:
        made = Hosts(count)
    except NotPermitted as reason:
        pytest.skip(str(reason))
    try:
        yield made
    finally:
        made.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=_SECONDS)
