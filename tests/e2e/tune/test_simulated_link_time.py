"""Two workers in network namespaces, with a link of 200 Mbit/s between them: the simulator foretells what it costs."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived_runtime.plan import ring
from collectived_runtime.plan.cost_model import LinkClass, Model
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.simulate import simulate

MEGABITS = 200


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture(scope="module")
def two_hosts(make_cluster: Callable[..., Any]) -> Iterator[Any]:
    names = [f"cd{os.getpid()}{side}" for side in "ab"]
    ends = [f"v{os.getpid()}{side}" for side in "ab"]
    made: list[str] = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
            for side, (name, end) in enumerate(zip(names, ends, strict=True)):
                ip("-n", name, "addr", "add", f"10.77.0.{side + 1}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                shape = f"tc -n {name} qdisc add dev {end} root tbf rate {MEGABITS}mbit burst 64kb latency 100ms"
                subprocess.run(shape.split(), check=True, capture_output=True, timeout=10)
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", b"") or str(error).encode()
            pytest.skip(f"network namespaces with a shaped link are not to be had here: {detail.decode().strip()}")
        yield make_cluster(2, tuple((name, f"10.77.0.{side + 1}") for side, name in enumerate(names)))
    finally:
        for name in made:
            ip("netns", "del", name)


@pytest.mark.parametrize("mebibytes", [4, 16])
def test_the_prediction_is_within_30_percent_of_the_measured_time(two_hosts: Any, mebibytes: int) -> None:
    count = mebibytes << 18

    def body(session: cd.Session, group: cd.Group) -> float:
        array = session.empty((count,), np.float32)
        array[:] = 1
        ring_hint = cd.CommunicationOptions(implementation=cd.CommunicationImplementation.RING)
        times = []
        for _ in range(4):
            group.barrier()
            begin = time.monotonic()
            group.all_reduce("sum", array, options=ring_hint)
            times.append(time.monotonic() - begin)
        return statistics.median(times[1:])

    measured = statistics.median(two_hosts.run_sessions(2, body))
    model = Model(across=LinkClass(100e-6, MEGABITS / 8 * 1e6))
    predicted = simulate(lambda me: ring.all_reduce(range(2), me, Span(0, count)), [[0], [1]], count, 4, model).seconds
    assert abs(predicted - measured) <= 0.3 * measured, (predicted, measured)
