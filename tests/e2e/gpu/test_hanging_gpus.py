"""GPUs that hang: ranks hear in time and the right thing, and get their memory back. On fake GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.e2e.gpu.cluster import Cluster, filled
from tests.fakes.client_cuda import FakeClientCuda

import collectived as cd


def run(cluster: Cluster, name: str, devices: list[str], body: Callable[[cd.Session, cd.Group], Any]) -> list[Any]:
    """Runs `body(session, group)` as every rank, which leaves without waiting for anything."""

    def one(rank: int) -> Any:
        session = cd.connect(cluster.addresses[0])
        group = session.join(name, len(devices), rank=rank, device=devices[rank], timeout=20)
        return body(session, group)

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(one, range(len(devices))))


def test_a_deadline_that_passes_while_a_gpu_hangs_is_one_verdict_and_memory_comes_back(
    start: Callable[..., Cluster], cuda: FakeClientCuda
) -> None:
    cluster, ready = start(1), threading.Barrier(2)

    def body(session: cd.Session, group: cd.Group) -> tuple[str, str]:
        x = filled(session, np.ones(10), group.device[-5:])
        group.all_reduce("sum", x)
        if ready.wait(20) == 0:
            cluster.hold.touch()
        ready.wait(20)
        began = time.monotonic()
        with pytest.raises(cd.errors.DeadlineExceededError) as caught:
            group.all_reduce("sum", x, options=cd.CommunicationOptions(timeout_seconds=0.5))
        assert time.monotonic() - began < 2
        memory: Any = session._find_device_memory(group.device)
        assert memory._retired, "the worker writes there"
        ready.wait(20)
        cluster.hold.unlink(missing_ok=True)
        group.rejoin(timeout=20)  # its memory is waited for
        assert (np.asarray(group.all_reduce("sum", x)) == 2).all()
        assert not memory._retired
        group.leave()
        session.close()
        return str(caught.value), caught.value.decided_by

    first, second = run(cluster, "late", ["GPU:0", "GPU:1"], body)
    assert first == second and "ranks 0, 1 had not finished" in first[0] and first[1] == "coordinator"


def test_who_aborts_while_gpus_hang_is_named_to_all_at_once(
    start: Callable[..., Cluster], cuda: FakeClientCuda
) -> None:
    cluster, ready = start(1), threading.Barrier(3)

    def body(session: cd.Session, group: cd.Group) -> None:
        x = filled(session, np.ones(10), group.device[-5:])
        group.all_reduce("sum", x)
        if ready.wait(20) == 0:
            cluster.hold.touch()
        ready.wait(20)
        work = group.all_reduce("sum", x, async_op=True)
        ready.wait(20)
        cluster.until(lambda: bool(cluster.status().workers[0].lanes[0].in_flight[0].state == "running"))
        ready.wait(20)
        began = time.monotonic()
        if group.rank == 2:
            group.abort("enough")
        else:
            with pytest.raises(cd.errors.AbortedError, match="rank 2 .* aborted the group: enough"):
                work.result(20)
        assert time.monotonic() - began < 1
        ready.wait(20)
        cluster.hold.unlink(missing_ok=True)
        group.rejoin(timeout=20)
        assert (np.asarray(group.all_reduce("sum", x)) == 3).all()
        group.leave()
        session.close()

    run(cluster, "aborted", ["GPU:0", "GPU:1", "GPU:0"], body)
