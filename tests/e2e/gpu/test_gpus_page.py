"""The snippets of docs/guide/gpus.md, as two ranks on fake GPUs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.docs.blocks import claimed
from tests.e2e.gpu.cluster import Cluster, filled
from tests.fakes.client_cuda import FakeClientCuda
from tests.fakes.libraries import FakeCupy

import collectived as cd

JOINS, WAITS, BY_NCCL = (compile(block.text, block.place, "exec") for block in claimed(__file__))


@pytest.fixture(scope="module")
def cluster(start: Callable[..., Cluster]) -> Cluster:
    return start(1)


def test_a_session_joins_with_a_gpu_and_has_memory_on_it(
    cluster: Cluster, cuda: FakeClientCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = FakeCupy()
    monkeypatch.setitem(__import__("sys").modules, "cupy", cupy)
    monkeypatch.setenv("COLLECTIVED_WORKER", cluster.addresses[0])

    def rank(number: int) -> tuple[str, list[float], Any]:
        with cd.connect() as own:
            names: dict[str, Any] = {"cd": cd, "torch": cupy, "tensor": filled(own, np.full(3, number + 1.0))}
            exec(JOINS, names)
            found = str(names["group"].members[number].device), np.asarray(names["total"]).tolist(), names["x"]
            names["session"].close()
        return found

    with ThreadPoolExecutor(2) as pool:
        for device, total, x in pool.map(rank, range(2)):
            assert device.endswith("GPU:0") and total == [3.0] * 3
            assert (type(x), x.shape) == (cupy.ndarray, (1024, 1024))


def test_a_wait_leaves_the_device_to_it_and_a_result_comes_when_it_is_there(
    cluster: Cluster, cuda: FakeClientCuda
) -> None:
    def body(session: cd.Session, group: cd.Group) -> tuple[Any, ...]:
        stepped: list[Any] = []
        names = {"group": group, "gradients": filled(session, np.full(3, group.rank + 1.0)), "model": "the model"}
        exec(WAITS, {**names, "evaluate": str.upper, "step": lambda *given: stepped.append(given)})
        ((model, total),) = stepped
        return model, np.asarray(total).tolist()

    assert cluster.run(2, body) == [("the model", [3.0] * 3)] * 2


def test_an_implementation_is_asked_for(cluster: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> Any:
        names: dict[str, Any] = {"cd": cd, "group": group, "tensor": filled(session, np.full(3, group.rank + 1.0))}
        exec(BY_NCCL, names)
        return np.asarray(names["total"]).tolist()

    assert cluster.run(2, body) == [[3.0] * 3] * 2
