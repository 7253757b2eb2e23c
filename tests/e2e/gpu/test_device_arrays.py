"""Arrays of CuPy, PyTorch and JAX on a GPU of this machine in all collectives, compared with NumPy.

One library in one process: `pytest -n 0 -rs --timeout-method=thread tests/e2e/gpu/test_device_arrays.py -k cupy-real`,
then `torch-real` and `jax-real`. With that method a call that hangs in the driver ends with its process.
The same tests run over stand-ins for CuPy and JAX on fake GPUs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.e2e.gpu.array_library import REAL, STAND_INS, ArrayLibrary, stand_in
from tests.e2e.gpu.cluster import Cluster
from tests.e2e.gpu.conftest import real_cuda
from tests.e2e.gpu.gates import Gates
from tests.fakes.client_cuda import FakeClientCuda, fake_gpus

import collectived as cd
from collectived.gpu import driver

# The libraries and their versions are those of the machine: what they warn of is no fault of collectives.
pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("default")]

SHAPES = ((4, 6), (515, 1031))  # the second is 2 MiB of float32, and no multiple of anything
Call = Callable[[cd.Group, Any], Any]
Expected = Callable[[list[NDArray[Any]], int], NDArray[Any] | None]


@pytest.fixture(
    scope="module", params=[*(f"{name}-stand-in" for name in STAND_INS), *(f"{name}-real" for name in REAL)]
)
def library(request: pytest.FixtureRequest) -> Iterator[ArrayLibrary]:
    name, _, kind = request.param.partition("-")
    with contextlib.ExitStack() as stack:
        stack.callback(driver.set_cuda, None)
        if kind == "real":
            real_cuda()
            driver.set_cuda(None)
            yield REAL[name]()
        else:
            fake = stack.enter_context(fake_gpus())
            yield stack.enter_context(stand_in(name, fake))


@pytest.fixture(scope="module")
def gates(library: ArrayLibrary) -> Gates:
    return Gates()


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, bool], Cluster]]:
    made: dict[tuple[int, bool], Cluster] = {}

    def find(workers: int, real: bool) -> Cluster:
        if (workers, real) not in made:
            folder: Path = tmp_path_factory.mktemp("arrays")
            made[workers, real] = Cluster(workers, 1, folder, real=real)
        return made[workers, real]

    yield find
    for cluster in made.values():
        cluster.close()


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def cluster(
    request: pytest.FixtureRequest, library: ArrayLibrary, clusters: Callable[[int, bool], Cluster]
) -> Iterator[Cluster]:
    yield clusters(request.param, library.real)
    cuda = driver.get_cuda()
    if isinstance(cuda, FakeClientCuda):
        cuda.free_all()


def value_of(rank: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Small integers, of which sums and halves are exact in every type."""
    return ((np.arange(np.prod(shape)) * 3 + 7 * rank) % 50).reshape(shape).astype(dtype)


def piece(value: NDArray[Any], rank: int) -> NDArray[Any]:
    return np.array_split(value, 2)[rank]


def mean(values: list[NDArray[Any]], _: int) -> NDArray[Any]:
    found: NDArray[Any] = np.mean([value.astype(np.float64) for value in values], axis=0)
    return found.astype(np.float64 if values[0].dtype == np.int64 else values[0].dtype)


def exchanged(group: cd.Group, x: Any) -> Any:
    """What the other rank has sent."""
    group.send(x, 1 - group.rank, tag=3)
    return group.recv(1 - group.rank, tag=3)


COLLECTIVES: dict[str, tuple[Call, Expected]] = {
    "all_reduce sum": (lambda group, x: group.all_reduce("sum", x), lambda values, _: values[0] + values[1]),
    "all_reduce mean": (lambda group, x: group.all_reduce("mean", x), mean),
    "all_reduce max": (lambda group, x: group.all_reduce("max", x), lambda values, _: np.maximum(*values)),
    "reduce": (
        lambda group, x: group.reduce("sum", x, root=1),
        lambda values, rank: values[0] + values[1] if rank == 1 else None,
    ),
    "broadcast": (lambda group, x: group.broadcast(x, root=1), lambda values, _: values[1]),
    "all_gather": (lambda group, x: group.all_gather(x), lambda values, _: np.concatenate(values)),
    "all_gather by columns": (
        lambda group, x: group.all_gather(x, axis=1),
        lambda values, _: np.concatenate(values, axis=1),
    ),
    "gather": (
        lambda group, x: group.gather(x, root=1),
        lambda values, rank: np.concatenate(values) if rank == 1 else None,
    ),
    "scatter": (lambda group, x: group.scatter(x, root=1), lambda values, rank: piece(values[1], rank)),
    "reduce_scatter": (
        lambda group, x: group.reduce_scatter("sum", x),
        lambda values, rank: piece(values[0] + values[1], rank),
    ),
    "all_to_all": (
        lambda group, x: group.all_to_all(x),
        lambda values, rank: np.concatenate([piece(value, rank) for value in values]),
    ),
    "send and recv": (exchanged, lambda values, rank: values[1 - rank]),
}
WITH_OUT: dict[str, Callable[[cd.Group, Any, Any], Any]] = {
    "all_reduce sum": lambda group, x, out: group.all_reduce("sum", x, out=out),
    "reduce": lambda group, x, out: group.reduce("sum", x, root=1, out=out),
    "broadcast": lambda group, x, out: group.broadcast(x, root=1, out=out),
    "all_gather": lambda group, x, out: group.all_gather(x, out=out),
    "scatter": lambda group, x, out: group.scatter(x, root=1, out=out),
    "reduce_scatter": lambda group, x, out: group.reduce_scatter("sum", x, out=out),
    "all_to_all": lambda group, x, out: group.all_to_all(x, out=out),
}


def same(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """Compares every bit; fails with where they differ."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    differing = np.flatnonzero((found != expected).ravel())
    assert not differing.size, (
        f"{differing.size} of {found.size} elements of {found.dtype}{list(found.shape)} differ, the first at "
        f"{differing[0]}: {found.ravel()[differing[0]]} instead of {expected.ravel()[differing[0]]}"
    )


def is_of_the_host(value: Any, name: str, rank: int) -> bool:
    """Whether it is a NumPy array where a rank has nothing that says of which kind its result is to be."""
    return isinstance(value, np.ndarray) and (name == "send and recv" or (name == "scatter" and rank != 1))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_what_numpy_says_in_every_type(cluster: Cluster, library: ArrayLibrary, name: str) -> None:
    call, expect = COLLECTIVES[name]

    def body(session: cd.Session, group: cd.Group) -> None:
        for dtype in library.dtypes:
            for shape in SHAPES:
                expected = expect([value_of(rank, shape, dtype) for rank in range(2)], group.rank)
                x = library.array(value_of(group.rank, shape, dtype))
                for _ in range(2):  # the second time over memory and kernels that are there
                    y = call(group, x)
                    assert (y is None) == (expected is None)
                    if expected is not None:
                        assert library.is_own(y) or is_of_the_host(y, name, group.rank), f"{type(y)} of {dtype}{shape}"
                        same(library.host(y) if library.is_own(y) else y, expected)
        group.barrier()

    cluster.run(2, body, device="GPU:0")


@pytest.mark.parametrize("name", WITH_OUT)
def test_a_result_is_written_into_an_array_of_the_caller(cluster: Cluster, library: ArrayLibrary, name: str) -> None:
    if not library.written:
        pytest.skip("its arrays are never written")
    (_, expect), call = COLLECTIVES[name], WITH_OUT[name]

    def body(session: cd.Session, group: cd.Group) -> None:
        for dtype in library.dtypes:
            for shape in SHAPES:
                expected = expect([value_of(rank, shape, dtype) for rank in range(2)], group.rank)
                x = library.array(value_of(group.rank, shape, dtype))
                like = value_of(0, shape, dtype) if expected is None else expected
                out = library.array(np.zeros_like(like))
                found = call(group, x, out)
                assert found is (out if expected is not None else None)
                same(library.host(out), np.zeros_like(like) if expected is None else expected)
                same(library.host(x), value_of(group.rank, shape, dtype))

    cluster.run(2, body, device="GPU:0")


def test_an_array_is_reduced_into_itself(cluster: Cluster, library: ArrayLibrary) -> None:
    if not library.written:
        pytest.skip("its arrays are never written")

    def body(session: cd.Session, group: cd.Group) -> None:
        expected = value_of(0, SHAPES[1], np.dtype(np.float32)) + value_of(1, SHAPES[1], np.dtype(np.float32))
        x = library.array(value_of(group.rank, SHAPES[1], np.dtype(np.float32)))
        assert group.all_reduce("sum", x, out=x) is x
        same(library.host(x), expected)
        work = group.all_reduce("max", x, out=x, async_op=True)
        assert work.wait() is x
        same(library.host(x), expected)

    cluster.run(2, body, device="GPU:0")


def test_parts_of_an_allocation_and_columns_and_nothing_at_all(cluster: Cluster, library: ArrayLibrary) -> None:
    if not library.real:
        pytest.skip("stand-ins cannot be cut")

    def body(session: cd.Session, group: cd.Group) -> None:
        hosts = [value_of(rank, (64, 33), np.dtype(np.float32)) for rank in range(2)]
        x = library.array(hosts[group.rank])
        total = hosts[0] + hosts[1]
        for cut in (np.s_[3:17], np.s_[:, 5:9], np.s_[::2], np.s_[7, 1:], np.s_[9:9]):
            same(library.host(group.all_reduce("sum", x[cut])), total[cut])

    cluster.run(2, body, device="GPU:0")


def test_values_of_a_nest_keep_their_kinds(cluster: Cluster, library: ArrayLibrary) -> None:
    def body(session: cd.Session, group: cd.Group) -> None:
        host = value_of(group.rank, (5, 7), np.dtype(np.float32))
        total = value_of(0, (5, 7), np.dtype(np.float32)) + value_of(1, (5, 7), np.dtype(np.float32))
        value = {"gpu": library.array(host), "host": host, "many": [library.array(host) for _ in range(10)], "one": 2.5}
        found: Any = group.all_reduce("sum", value)
        assert library.is_own(found["gpu"]) and isinstance(found["host"], np.ndarray) and found["one"] == 5.0
        for array in (found["gpu"], *found["many"]):
            same(library.host(array), total)
        same(found["host"], total)

    cluster.run(2, body, device="GPU:0")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64"])
def test_memory_of_the_session_is_an_array_of_the_library(cluster: Cluster, library: ArrayLibrary, dtype: str) -> None:
    element = next((one for one in library.dtypes if one.name == dtype), None)
    if not library.written or element is None:
        pytest.skip("its arrays cannot look into memory that is written, or have no such elements")

    def body(session: cd.Session, group: cd.Group) -> None:
        cuda = driver.get_cuda()
        made = session.empty((33, 5), element, device="GPU:0", like=library.module)
        assert library.is_own(made) and made.shape == (33, 5)
        source = library.array(value_of(group.rank, (33, 5), element))
        for _ in range(3):
            cuda.copy(0, library.address(made), library.address(source), 33 * 5 * element.itemsize, 1)
            cuda.synchronize(0, 1)
            same(library.host(made), value_of(group.rank, (33, 5), element))
            total = value_of(0, (33, 5), element) + value_of(1, (33, 5), element)
            same(library.host(group.all_reduce("sum", made)), total)
            assert group.all_reduce("sum", made, out=made) is made
            same(library.host(made), total)

    cluster.run(2, body, device="GPU:0")


def test_after_a_wait_a_value_is_used_on_the_current_stream(cluster: Cluster, library: ArrayLibrary) -> None:
    """Nobody waits on the host: the next collective takes what work on the stream makes of the last result."""

    def body(session: cd.Session, group: cd.Group) -> None:
        for shape in SHAPES:
            host = value_of(group.rank, shape, np.dtype(np.float32))
            expected = value_of(0, shape, np.dtype(np.float32)) + value_of(1, shape, np.dtype(np.float32))
            with library.stream():
                x, found = library.array(host), []
                for _ in range(20):
                    y = group.all_reduce("sum", x, async_op=True).wait(30)
                    found.append(library.doubled(y))  # which reads it on the stream that waits
                for one in found:
                    same(library.host(one), 2 * expected)
                x = library.array(np.ones(shape, np.float32))
                for _ in range(10):  # 1 → 2 × 2 → …
                    x = library.doubled(group.all_reduce("sum", x, async_op=True).wait(30))
                same(library.host(x), np.full(shape, 4.0**10, np.float32))

    cluster.run(2, body, device="GPU:0")


def test_inputs_may_be_overwritten_on_the_stream_that_waited(cluster: Cluster, library: ArrayLibrary) -> None:
    if not library.written:
        pytest.skip("its arrays are never written")

    def body(session: cd.Session, group: cd.Group) -> None:
        cuda, nbytes = driver.get_cuda(), 4 * SHAPES[1][0] * SHAPES[1][1]
        with library.stream() as stream:
            others = [library.array(np.full(SHAPES[1], float(n + group.rank), np.float32)) for n in range(16)]
            x = library.array(np.zeros(SHAPES[1], np.float32))
            found = []
            for other in others:
                cuda.copy(0, library.address(x), library.address(other), nbytes, stream)
                found.append(group.all_reduce("sum", x, async_op=True).wait(30))
            for n, y in enumerate(found):
                same(library.host(y), np.full(SHAPES[1], 2.0 * n + 1, np.float32))

    cluster.run(2, body, device="GPU:0")


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async_op"])
def test_a_value_that_the_gpu_still_writes_when_the_call_is_made(
    cluster: Cluster, library: ArrayLibrary, gates: Gates, blocking: bool
) -> None:
    """A kernel that lasts until the test ends it, and then a copy: on the caller's current stream, before the call."""
    if not library.has_streams:
        pytest.skip("it has no current stream")

    def body(session: cd.Session, group: cd.Group) -> None:
        cuda = driver.get_cuda()
        hosts = [value_of(rank, SHAPES[1], np.dtype(np.float32)) for rank in range(2)]
        source = library.array(hosts[group.rank])
        with library.stream() as stream, ThreadPoolExecutor(1) as pool:
            x = library.array(np.zeros(SHAPES[1], np.float32))
            group.all_reduce("sum", x)  # memory and kernels are there, and events are open
            group.all_reduce("sum", x, async_op=True).wait(30)
            both.wait(30)
            with gates.closed(stream) as open_it:
                cuda.copy(0, library.address(x), library.address(source), hosts[0].nbytes, stream)
                if blocking:
                    both.wait(30)
                    opener = pool.submit(open_when_called, session, open_it)
                    y = group.all_reduce("sum", x)
                    opener.result()
                else:
                    work = group.all_reduce("sum", x, async_op=True)
                    both.wait(30)  # nobody's value is there, and both have called
                    assert not work.done(), "its value is not written yet"
                    open_it()
                    y = work.wait(30)
            same(library.host(y), hosts[0] + hosts[1])
            group.barrier()

    def open_when_called(session: cd.Session, open_it: Callable[[], None]) -> None:
        cluster.until(lambda: any(one.in_flight for one in cluster.status().groups))
        open_it()

    both = threading.Barrier(2)
    cluster.run(2, body, device="GPU:0")


@pytest.mark.parametrize("kind", ["asynchronous", "managed"])
def test_memory_that_has_no_handle_is_copied(cluster: Cluster, library: ArrayLibrary, kind: str) -> None:
    if not library.real or library.module.__name__ != "cupy":
        pytest.skip("of CuPy's allocators on a real GPU")
    cuda = library.module.cuda
    allocator = cuda.MemoryAsyncPool().malloc if kind == "asynchronous" else cuda.malloc_managed

    def body(session: cd.Session, group: cd.Group) -> None:
        for shape in SHAPES:
            hosts = [value_of(rank, shape, np.dtype(np.float32)) for rank in range(2)]
            with cuda.using_allocator(allocator):
                x = library.array(hosts[group.rank])
            for _ in range(2):
                same(library.host(group.all_reduce("sum", x)), hosts[0] + hosts[1])
            assert group.all_reduce("sum", x, out=x) is x
            same(library.host(x), hosts[0] + hosts[1])

    cluster.run(2, body, device="GPU:0")


def test_a_value_that_jax_still_computes_when_the_call_is_made(cluster: Cluster, library: ArrayLibrary) -> None:
    if library.has_streams or not library.real:
        pytest.skip("it is not JAX on a real GPU")
    jax = library.module
    size = 8192
    square: Any = library.array(np.full((size, size), 1 / size, np.float32))

    def slow(x: Any, square: Any) -> Any:
        """X plus one, when some dozens of products of large matrices are there: each element of them is 1 / size."""
        made = jax.lax.fori_loop(0, 40, lambda _, one: square @ one, square)
        return x + made[0, 0] * size

    compiled = jax.jit(slow)
    host = np.zeros(SHAPES[1], np.float32)
    np.testing.assert_allclose(library.host(compiled(library.array(host), square)), 1.0, rtol=1e-2)
    late = threading.Event()

    def body(session: cd.Session, group: cd.Group) -> None:
        x = library.array(host)
        group.all_reduce("sum", library.array(host))
        for async_op in (False, True):
            y = compiled(x, square)
            work: Any = group.all_reduce("sum", y, async_op=True) if async_op else None
            if not y.is_ready():
                late.set()
            total = work.wait(30) if async_op else group.all_reduce("sum", y)
            same(library.host(total), 2 * library.host(y))

    cluster.run(2, body, device="GPU:0")
    assert late.is_set(), "every value was computed before its call: this has tried nothing"
