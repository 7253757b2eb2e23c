"""Hosts of the drills: packets are lost as asked, and nothing is left behind."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tests.drills.hosts import CONTROL, DATA, NETWORKS, Hosts, NotPermitted, hosts_or_skip
from tests.drills.switch import Switch, Weather

LISTEN = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.bind((sys.argv[1], 9))
    sock.settimeout(float(sys.argv[2]))
    print("bound", flush=True)
    try:
        print(sock.recv(9).decode())
    except TimeoutError:
        print("nothing")
"""
SEND = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.sendto(b"word", (sys.argv[1], 9))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(2) as made:
        yield made


def heard(hosts: Hosts, source: int, target: int, network: str, seconds: float) -> bool:
    address = hosts.address(target, network)
    listening = [*hosts.inside(target), sys.executable, "-S", "-c", LISTEN, address, str(seconds)]
    with subprocess.Popen(listening, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout and listener.stdout.readline() == "bound\n"
        sending = [*hosts.inside(source), sys.executable, "-S", "-c", SEND, address]
        subprocess.run(sending, check=True, timeout=20)
        return listener.stdout.readline() == "word\n"


@pytest.mark.parametrize("network", NETWORKS)
def test_a_packet_arrives(hosts: Hosts, network: str) -> None:
    assert heard(hosts, 0, 1, network, 20)


def test_a_host_that_is_parted_from_one_network_is_reached_by_the_other_until_it_is_healed(hosts: Hosts) -> None:
    hosts.part(1, [DATA])
    assert not heard(hosts, 0, 1, DATA, 0.2)
    assert heard(hosts, 0, 1, CONTROL, 20)
    hosts.heal(1)
    assert heard(hosts, 0, 1, DATA, 20)


def test_packets_can_be_lost_in_one_direction_alone(hosts: Hosts) -> None:
    hosts.lose_sent(1)
    assert not heard(hosts, 1, 0, DATA, 0.2)
    assert heard(hosts, 0, 1, DATA, 20)
    hosts.heal(1)
    hosts.lose_received(1)
    assert not heard(hosts, 0, 1, DATA, 0.2)
    assert heard(hosts, 1, 0, DATA, 20)
    hosts.heal(1)


def test_packets_are_lost_and_delayed_as_told(hosts: Hosts) -> None:
    hosts.impair(Weather(loss=1.0))
    assert not heard(hosts, 0, 1, DATA, 0.2)
    assert heard(hosts, 0, 1, CONTROL, 20), "the other network is not concerned"
    hosts.impair(Weather(delay=0.3))
    begin = time.monotonic()
    assert heard(hosts, 0, 1, DATA, 20)
    assert time.monotonic() - begin >= 0.3
    hosts.heal()
    assert heard(hosts, 0, 1, DATA, 20)


def test_with_jitter_packets_overtake_each_other() -> None:
    ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    switch = Switch()
    for number, (inside, outside) in enumerate(ends):
        inside.setblocking(False)
        switch.add(number, os.dup(inside.fileno()), f"10.0.0.{number}")
        outside.settimeout(20)
    switch.weather = Weather(jitter=0.1)
    switch.start()
    sender, receiver = ends[0][1], ends[1][1]
    packets = [bytes(16) + socket.inet_aton("10.0.0.1") + bytes([number]) for number in range(50)]
    for packet in packets:
        sender.send(packet)
    came = [receiver.recv(64) for _ in packets]
    assert came != packets and sorted(came) == packets
    switch.close()
    for pair in ends:
        for end in pair:
            end.close()


def test_nothing_is_left_of_hosts_that_are_closed(hosts: Hosts) -> None:
    mark = f"cd{secrets.token_hex(3)}"
    made = Hosts(1, mark=mark)
    assert namespaces(mark) == {f"{mark}-host0"}
    made.close()
    made.close()
    assert not namespaces(mark)


def test_nothing_is_left_of_hosts_that_could_not_be_made(hosts: Hosts) -> None:
    mark = f"cd{secrets.token_hex(3)}"
    with pytest.raises(NotPermitted, match="not to be had here"):
        Hosts(2, prefix="10.777", mark=mark)
    assert not namespaces(mark)


def namespaces(mark: str) -> set[str]:
    told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=20).stdout
    return {line.split()[0] for line in told.splitlines() if line.startswith(mark)}
