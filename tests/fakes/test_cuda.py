"""What every implementation of the seam to CUDA does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.e2e.gpu.conftest import real_cuda
from tests.fakes.client_cuda import FakeClientCuda
from tests.fakes.cuda import FakeCuda, view_host_memory
from tests.fakes.ipc_exporter import BYTE, SIZE

from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.cuda.driver import Cuda, CudaError, FoldSpec
from collectived_runtime.plan.packing import result_dtype

Array = NDArray[Any]
COUNT = 5000
ROOT = Path(__file__).parents[2]
TYPES = (
    DType.INT32,
    DType.BFLOAT16,
    DType.FLOAT16,
    DType.FLOAT32,
    DType.FLOAT64,
    DType.INT64,
    DType.UINT8,
)  # of the issue; the kernels of all others are compared in tests/runtime/device


def until(over: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not over():
        assert time.monotonic() < end


class Bench:
    """Arrays on a device, by a stream of its own."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.stream = cuda.create_stream(0)
        self._event = cuda.create_event(0)
        self._pinned: list[int] = []
        self._allocated: list[int] = []

    def finish(self) -> None:
        self.cuda.record(self._event, self.stream)
        until(lambda: self.cuda.is_event_done(self._event))

    def put(self, array: Array) -> int:
        address, _ = self.cuda.allocate(0, array.nbytes)
        self._allocated.append(address)
        host = self.cuda.pin(array.nbytes)
        self._pinned.append(host)
        view_host_memory(host, array.nbytes)[:] = array.view(np.uint8)
        self.cuda.copy(address, host, array.nbytes, self.stream)
        self.finish()
        return address

    def get(self, address: int, like: Array) -> Array:
        host = self.cuda.pin(like.nbytes)
        self._pinned.append(host)
        self.cuda.copy(host, address, like.nbytes, self.stream)
        self.finish()
        return view_host_memory(host, like.nbytes).view(like.dtype).copy()

    def close(self) -> None:
        self.finish()
        for address in self._allocated:
            self.cuda.free(address)
        for address in self._pinned:
            self.cuda.unpin(address)
        self.cuda.destroy_event(self._event)
        self.cuda.destroy_stream(self.stream)


@pytest.fixture(params=["fake", "real"])
def cuda(request: pytest.FixtureRequest) -> Cuda:
    return FakeCuda() if request.param == "fake" else real_cuda()


def test_devices_are_numbered_and_have_names_of_their_own(cuda: Cuda) -> None:
    devices = cuda.devices()
    assert devices
    assert [device.number for device in devices] == list(range(len(devices)))
    assert len({device.uuid for device in devices}) == len(devices)
    assert all(device.uuid.startswith("GPU-") and device.name and device.total_bytes > 0 for device in devices)


def test_what_is_copied_there_comes_back(cuda: Cuda) -> None:
    bench = Bench(cuda)
    array = np.arange(COUNT, dtype=np.float64)
    there = bench.put(array)
    second, _ = cuda.allocate(0, array.nbytes)
    cuda.copy(second, there, array.nbytes, bench.stream)
    assert (bench.get(second, array) == array).all()
    cuda.free(second)
    bench.close()


def test_memory_is_cleared(cuda: Cuda) -> None:
    bench, array = Bench(cuda), np.ones(COUNT, np.int32)
    there = bench.put(array)
    cuda.clear(there, array.nbytes, bench.stream)
    assert not bench.get(there, array).any()
    bench.close()


def test_memory_comes_in_whole_pages_and_is_handed_over_by_a_descriptor(cuda: Cuda) -> None:
    address, size = cuda.allocate(0, 1)
    assert size >= 1 and size % 4096 == 0
    descriptor = cuda.export(address)
    assert descriptor >= 0
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    cuda.free(address)


@pytest.fixture
def lender(cuda: Cuda) -> Iterator[subprocess.Popen[str]]:
    line = [sys.executable, "-m", "tests.fakes.ipc_exporter", "fake" if isinstance(cuda, FakeCuda) else "real"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def handle_of(lender: subprocess.Popen[str]) -> bytes:
    assert lender.stdout is not None
    return bytes.fromhex(lender.stdout.readline())


def test_memory_of_another_process_is_read_where_it_lies(cuda: Cuda, lender: subprocess.Popen[str]) -> None:
    bench, handle = Bench(cuda), handle_of(lender)
    address, size = cuda.open_memory(0, handle)
    assert size >= SIZE
    assert (bench.get(address, np.zeros(SIZE, np.uint8)) == BYTE).all()
    assert cuda.open_memory(0, handle) == (address, size), "it is open already"
    cuda.close_memory(0, address)
    assert (bench.get(address + SIZE - 100, np.zeros(100, np.uint8)) == BYTE).all(), "it was opened twice"
    cuda.close_memory(0, address)
    bench.close()


def test_a_handle_of_nothing_is_an_error(cuda: Cuda) -> None:
    with pytest.raises(CudaError, match="cuIpcOpenMemHandle"):
        cuda.open_memory(0, bytes(64))


def test_more_memory_than_there_is_is_an_error_that_says_so(cuda: Cuda) -> None:
    with pytest.raises(CudaError) as refused:
        cuda.allocate(0, 2 * cuda.devices()[0].total_bytes)
    assert refused.value.code == 2
    address, _ = cuda.allocate(0, 1 << 20)  # and that there is
    cuda.free(address)


def test_an_event_is_over_when_what_came_before_it_is(cuda: Cuda) -> None:
    bench, event = Bench(cuda), cuda.create_event(0)
    assert cuda.is_event_done(event), "nothing has been recorded"
    bench.put(np.zeros(1 << 20, np.uint8))
    cuda.record(event, bench.stream)
    until(lambda: cuda.is_event_done(event))
    cuda.destroy_event(event)
    bench.close()


CHILD = """
import sys
kind, handle = sys.argv[1:]
if kind == "FakeCuda":
    from tests.fakes.client_cuda import FakeClientCuda as Client
else:
    from collectived.gpu.driver_cuda import ClientDriverCuda as Client
cuda = Client()
event, stream = cuda.open_event(0, bytes.fromhex(handle)), cuda.create_stream(0)
cuda.wait_event(0, event, stream)
print("waits", flush=True)
cuda.synchronize(0, stream)
assert cuda.is_event_done(event)
cuda.destroy_event(event)
cuda.destroy_stream(stream)
print("over", flush=True)
"""


def test_a_stream_of_another_process_waits_for_a_shared_event(cuda: Cuda) -> None:
    bench, (event, handle) = Bench(cuda), cuda.create_shared_event(0)
    assert len(handle) == 64 and cuda.is_event_done(event)
    bench.put(np.zeros(1 << 20, np.uint8))
    cuda.record(event, bench.stream)
    told = subprocess.run(
        [sys.executable, "-c", CHILD, type(cuda).__name__, handle.hex()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert told.stdout == "waits\nover\n", told.stderr
    assert cuda.is_event_done(event)
    cuda.destroy_event(event)
    bench.close()


def test_who_waits_for_a_shared_event_waits_for_it_as_it_was_recorded_then(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    cuda, client = FakeCuda(hold=hold), FakeClientCuda()
    stream, (event, handle) = cuda.create_stream(0), cuda.create_shared_event(0)
    opened = client.open_event(0, handle)
    cuda.record(event, stream)
    hold.touch()
    client.wait_event(0, opened, 1)
    cuda.record(event, stream)
    client.wait_event(0, opened, 2)
    assert not client.under_way(1) and client.under_way(2)
    hold.unlink()
    assert cuda.is_event_done(event)
    client.synchronize(0, 2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX], ids=lambda op: op.value)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.label)
def test_what_is_folded_on_a_device_has_the_bits_of_the_host(cuda: Cuda, op: ReduceOp, dtype: DType) -> None:
    bench = Bench(cuda)
    random = np.random.default_rng(1)
    arrays = [(random.standard_normal(COUNT) * 100).astype(to_numpy(dtype)) for _ in range(4)]
    result = result_dtype(dtype, op)
    arithmetic = Arithmetic(op, dtype, result, len(arrays))
    expected = np.empty(COUNT, to_numpy(result))
    arithmetic.combine(arrays, expected)
    there = [bench.put(array) for array in arrays]
    out, partials = bench.put(np.zeros_like(expected)), bench.put(np.zeros(COUNT * arithmetic.partial_bytes, np.uint8))

    second = bench.put(np.zeros_like(expected))
    cuda.fold(FoldSpec(op, dtype, result, 4, widen=True, finish=True), there, [out, second], COUNT, bench.stream)
    assert (bench.get(out, expected) == expected).all() and (bench.get(second, expected) == expected).all()
    unaligned = second + expected.itemsize
    cuda.fold(FoldSpec(op, dtype, result, 4, widen=True, finish=True), there, [unaligned], COUNT - 1, bench.stream)
    assert (bench.get(unaligned, expected[1:]) == expected[:-1]).all()
    cuda.fold(FoldSpec(op, dtype, result, 4, widen=True, finish=False), there, [partials], COUNT, bench.stream)
    cuda.fold(FoldSpec(op, dtype, result, 4, widen=False, finish=True), [partials], [out], COUNT, bench.stream)
    assert (bench.get(out, expected) == expected).all()
    bench.close()
