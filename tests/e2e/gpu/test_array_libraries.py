"""Arrays of JAX, and of libraries that are known by a protocol alone, on fake GPUs."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.e2e.gpu.cluster import Cluster
from tests.fakes.client_cuda import FakeClientCuda
from tests.fakes.libraries import FakeJax, Interface, Speaker, own

import collectived as cd
from collectived.gpu import dlpack
from collectived.gpu.array import LEGACY_STREAM, DeviceArray


@pytest.fixture(scope="module")
def worker(start: Callable[..., Cluster]) -> Cluster:
    return start(1)


@pytest.fixture
def jax(cuda: FakeClientCuda, monkeypatch: pytest.MonkeyPatch) -> FakeJax:
    made = FakeJax(cuda)
    monkeypatch.setitem(sys.modules, "jax", made)
    return made


def test_jax_arrays_are_read_where_they_lie_and_come_back_in_memory_of_jax(
    worker: Cluster, cuda: FakeClientCuda, jax: FakeJax
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = jax.ArrayImpl(own(cuda, np.arange(24, dtype=np.float32).reshape(4, 6)))
        for _ in range(50):
            y = group.all_reduce("sum", {"a": x})["a"]
            assert type(y) is jax.ArrayImpl and (y.host == 2 * x.host).all()
            assert cuda.find_allocation(y.host.ctypes.data).exportable, "it does not lie in the worker's"
        assert set(x.asked) == {LEGACY_STREAM}
        group.barrier()
        assert len(cuda.mapped) == 2, "places of results serve again: one arena for each session"
        group.barrier()

    worker.run(2, body, device="GPU:0")
    assert not cuda.copied_bytes
    gc.collect()
    assert not dlpack._exported


def test_leaves_for_jax_that_do_not_begin_at_16_bytes_come_back_too(
    worker: Cluster, cuda: FakeClientCuda, jax: FakeJax
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        value = [jax.ArrayImpl(own(cuda, np.full(n, n, np.float32))) for n in (1, 3, 5, 100, 2)]
        found = group.all_reduce("sum", value)
        for x, y in zip(value, found, strict=True):
            assert type(y) is jax.ArrayImpl and (y.host == 2 * x.host).all()

    worker.run(2, body, device="GPU:0")


def test_jax_arrays_that_pass_by_the_host_come_back_on_their_gpu(
    worker: Cluster, cuda: FakeClientCuda, jax: FakeJax
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = jax.ArrayImpl(own(cuda, np.full((2, 3), group.rank, np.int32)))
        y = group.all_gather(x)
        assert type(y) is jax.ArrayImpl and y.host.tolist() == [[0] * 3] * 2 + [[1] * 3] * 2

    worker.run(2, body, device="GPU:0")


def test_a_jax_array_is_kept_until_it_has_been_read(worker: Cluster, cuda: FakeClientCuda, jax: FakeJax) -> None:
    """JAX would give its memory to another array, on a stream of its own."""

    def body(session: cd.Session, group: cd.Group) -> None:
        group.all_reduce("sum", session.empty(10, device="GPU:0"))
        x = jax.ArrayImpl(own(cuda, np.ones(10)))
        known = weakref.ref(x)
        cuda.held.add(LEGACY_STREAM)
        work = group.all_reduce("sum", x, async_op=True)
        del x
        gc.collect()
        assert known() is not None and not work.done()
        cuda.let_go()
        assert (work.result().host == 1).all()
        gc.collect()
        assert known() is None

    worker.run(1, body, device="GPU:0")


def test_jax_arrays_are_never_written(worker: Cluster, cuda: FakeClientCuda, jax: FakeJax) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = jax.ArrayImpl(own(cuda, np.ones(10)))
        with pytest.raises(TypeError, match="out is a ArrayImpl: expected a NumPy array"):
            group.all_reduce("sum", x, out=x)
        with pytest.raises(TypeError, match="like is of JAX"):
            session.empty(like=x)

    worker.run(1, body, device="GPU:0")


def test_a_jax_array_on_several_gpus_is_refused(
    worker: Cluster, cuda: FakeClientCuda, jax: FakeJax, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        x = jax.ArrayImpl(own(cuda, np.ones(10)))
        monkeypatch.setattr(type(x), "devices", lambda self: {jax.Device(0), jax.Device(1)})
        with pytest.raises(TypeError, match="a JAX array on gpu, spread over 2 devices: .*; send its parts"):
            group.all_reduce("sum", x)

    worker.run(1, body, device="GPU:0")


def test_what_speaks_dlpack_comes_back_by_its_own_from_dlpack(worker: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        host = own(cuda, np.arange(24.0).reshape(4, 6))
        x = Speaker(host)
        y = group.all_reduce("sum", x)
        assert type(y) is Speaker and (y.host == host).all()
        assert x.asked == [LEGACY_STREAM] and not cuda.copied_bytes
        made = session.empty(like=x)
        assert type(made) is Speaker and made.host.shape == (4, 6)
        made.host[...] = 5
        assert (group.all_reduce("max", made).host == 5).all()
        assert not cuda.copied_bytes, "it lies in worker memory"
        with pytest.raises(TypeError, match="a Speaker on a GPU whose elements cannot be had: they do not lie side by"):
            group.all_reduce("sum", Speaker(host.T))
        with pytest.raises(TypeError, match="out is a Speaker: expected a NumPy array"):
            group.all_reduce("sum", x, out=x)

    worker.run(1, body, device="GPU:0")
    gc.collect()
    assert not dlpack._exported


def test_of_what_has_an_interface_alone_results_are_device_arrays(worker: Cluster, cuda: FakeClientCuda) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        host = own(cuda, np.arange(24.0).reshape(4, 6))
        y = group.all_reduce("sum", Interface(host))
        assert isinstance(y, DeviceArray) and (np.asarray(y) == host).all()
        assert cuda.handles == 1
        cuda.held.add(7)
        late = group.all_reduce("sum", Interface(host, stream=7), async_op=True)
        assert not late.done(), "it is written on a stream of its own"
        cuda.let_go()
        assert (np.asarray(late.result()) == host).all()
        empty: Any = group.all_reduce("sum", Interface(host[:0]))
        assert empty.shape == (0, 6)

    worker.run(1, body, device="GPU:0")


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"strides": (8, 32)}, "they do not lie side by side in row-major order"),
        ({"mask": object()}, "some of them are masked"),
        ({"typestr": "|V3"}, "has dtype .*V3: expected one of"),
        ({"data": (1 << 20, False)}, "which this process cannot copy: .* is no memory of a GPU"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_interface_that_cannot_be_followed_is_refused(
    worker: Cluster, cuda: FakeClientCuda, told: dict[str, Any], says: str
) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        with pytest.raises(TypeError, match=says):
            group.all_reduce("sum", Interface(own(cuda, np.ones((2, 4))), **told))

    worker.run(1, body, device="GPU:0")
