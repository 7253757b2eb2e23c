"""Two hosts between which no packet passes, while both reach the coordinator: who waits for the other hears of it."""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from tests.drills.hosts import CONTROL, DATA, Hosts, hosts_or_skip
from tests.drills.switch import Weather

import collectived as cd
from collectived.testing.daemon import Daemon

PATIENCE = 30.0
LARGE = 1 << 21  # elements: 8 MiB, more than a segment takes


class Pair:
    """A worker on each of two hosts, and a coordinator on a third one."""

    def __init__(self, hosts: Hosts, stack: ExitStack) -> None:
        self.hosts = hosts
        folder, secret = stack.enter_context(tempfile.TemporaryDirectory(prefix="cd-")), secrets.token_hex(16)
        at = f"{hosts.address(2, CONTROL)}:7450"

        def start(host: int, *words: str) -> str:
            daemon = Daemon(words, secret, hosts.inside(host))
            stack.callback(daemon.close)
            return str(daemon.wait_ready(PATIENCE)["address"])

        start(2, "coordinator", "--listen", at, "--heartbeat", "1")
        self.workers = [
            start(
                *(task, "worker", "--task", str(task), "--folder", folder, "--host-name", f"host{task}"),
                *("--coordinator", at, "--link-listen", f"{hosts.address(task, DATA)}:0"),
            )
            for task in range(2)
        ]

    def run(self, body: Callable[[cd.Group], object]) -> None:
        """Both ranks, each on its own worker."""

        def rank(number: int) -> None:
            with cd.connect(self.workers[number]) as session:
                body(session.join("pair", 2, rank=number, timeout=PATIENCE))

        with ThreadPoolExecutor(2) as pool:
            for ended in [pool.submit(rank, number) for number in range(2)]:
                ended.result(PATIENCE)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        hosts = stack.enter_context(hosts_or_skip(3))
        yield Pair(hosts, stack)


def receive(group: cd.Group) -> object:
    return group.recv(1 - group.rank)


def sum_much(group: cd.Group) -> object:
    return group.all_reduce("sum", np.ones(LARGE, np.float32))


def sum_little(group: cd.Group) -> object:
    return group.all_reduce("sum", 1.0)


@pytest.mark.parametrize("wait", [receive, sum_much, sum_little])
def test_who_waits_without_a_timeout_hears_that_the_network_is_down(
    pair: Pair, wait: Callable[[cd.Group], object]
) -> None:
    both = threading.Barrier(2)

    def body(group: cd.Group) -> None:
        for _ in range(4):  # links are there, and the native core carries what it can
            sum_little(group)
            group.send(np.ones(3), 1 - group.rank)
            group.recv(1 - group.rank)
        group.barrier()
        both.wait(PATIENCE)  # what the barrier has sent is there
        if group.rank == 0:
            pair.hosts.part(1, [DATA])
        with pytest.raises(cd.errors.UnavailableError, match="the network between them is down") as caught:
            for _ in range(2):  # the first may be on its way already
                wait(group)
        assert not caught.value.missing and caught.value.rejoin
        assert "no rank is known to be lost" in str(caught.value)
        pair.hosts.heal(1)
        group.rejoin(timeout=PATIENCE)
        assert sum_little(group) == 2.0

    pair.run(body)


def test_a_network_that_loses_and_delays_packets_is_slow_and_not_dead(pair: Pair) -> None:
    def body(group: cd.Group) -> None:
        group.barrier()
        pair.hosts.impair(Weather(loss=0.05, delay=0.05, jitter=0.02))
        for _ in range(3):
            assert sum_little(group) == 2.0
            assert np.all(np.asarray(sum_much(group)) == 2.0)
        pair.hosts.heal()
        group.barrier()

    pair.run(body)
