"""PyTorch tensors as leaves, and gradients of DistributedDataParallel through the hook, with a scripted worker."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectived as cd
from collectived.shared.doorbell import Doorbell
from collectived.values import leaves, libraries
from collectived_proto.errors import Code
from collectived_proto.ipc import messages

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

from collectived.integrations.torch import allreduce_hook  # noqa: E402  # imports torch

NUMBERS = [
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
]


@pytest.mark.parametrize("dtype", NUMBERS)
def test_tensors_come_back_as_tensors(make: Any, dtype: str) -> None:
    kind = getattr(torch, dtype)
    value = {"a": torch.arange(6).reshape(2, 3).to(kind), "b": [torch.tensor(2).to(kind), None, np.ones(2)]}
    result = make(size=3).group.all_reduce("sum", value)
    assert type(result["a"]) is torch.Tensor and result["a"].dtype is kind
    assert result["a"].tolist() == [[0, 3, 6], [9, 12, 15]]
    assert type(result["b"][0]) is torch.Tensor and result["b"][0].shape == () and result["b"][0].item() == 6
    assert type(result["b"][2]) is np.ndarray


def test_boolean_tensors_are_broadcast(make: Any) -> None:
    result = make().group.broadcast(torch.tensor([True, False]))
    assert result.dtype is torch.bool and result.tolist() == [True, False]


def test_the_mean_of_integers_is_floating(make: Any) -> None:
    result = make().group.all_reduce("mean", torch.arange(3))
    assert result.dtype is torch.float64 and result.tolist() == [0, 1, 2]


class Marked(torch.Tensor):  # type: ignore[misc]  # torch is not there for the type checker
    pass


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.ones(2, requires_grad=True), [2, 2]),
        (torch.ones(2, requires_grad=True) * 3, [6, 6]),
        (torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), [2, 2]),
        (torch.ones(2).as_subclass(Marked), [2, 2]),
        (torch.arange(6.0).reshape(2, 3).T, [[0, 6], [2, 8], [4, 10]]),
        (torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)[:, ::2], [[0, 4], [6, 10]]),
        (torch.ones(1).expand(3), [2, 2, 2]),
        (torch.tensor([1 + 2j]).conj(), [2 - 4j]),
        (torch.tensor([1 + 2j]).conj().imag, [-4]),
        (torch.empty(0, 3), []),
    ],
    ids=[
        *("requires_grad", "not a leaf", "Parameter", "subclass", "transposed", "strided"),
        *("expanded", "conjugated", "negated", "empty"),
    ],
)
def test_tensors_of_any_make_come_back_plain_dense_and_without_a_gradient(make: Any, value: Any, expected: Any) -> None:
    result = make(size=2).group.all_reduce("sum", value)
    assert type(result) is torch.Tensor and result.shape == value.shape and result.tolist() == expected
    assert not result.requires_grad and result.is_contiguous()
    result += 1


def test_results_have_memory_of_their_own(make: Any) -> None:
    setting = make()
    value = torch.from_numpy(setting.memory.empty((4,), np.dtype(np.float32)))
    value[:] = 1
    first, second = setting.group.all_reduce("sum", value), setting.group.all_reduce("sum", [value])[0]
    first += 5
    assert first.tolist() == [7] * 4 and second.tolist() == [2] * 4 and value.tolist() == [1] * 4


def test_a_tensor_of_what_cannot_be_written_gets_memory_of_its_own() -> None:
    array = np.zeros(2)
    array.flags.writeable = False
    leaves.kind_of(torch.ones(1)).restore(array)[0] = 1
    assert array.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: torch.eye(3).to_sparse(), r"Tensor of PyTorch of layout torch.sparse_coo: send its .to_dense\(\)"),
        (lambda: torch.empty(3, device="meta"), "Tensor of PyTorch without data, on the device meta"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), r"quantized .*send its .dequantize"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"nested: send its parts, list"),
        (lambda: torch.zeros(2, dtype=torch.float8_e4m3fn), "of torch.float8_e4m3fn whose elements cannot be had"),
    ],
    ids=["sparse", "meta", "quantized", "nested", "float8"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # quantized and nested tensors are announced as leaving or new
def test_tensors_that_are_no_plain_host_memory_are_refused(make: Any, value: Any, says: str) -> None:
    setting = make()
    with pytest.raises(TypeError, match=rf"\['a'\]\[0\] is a {says}" if says[0] == "T" else says):
        setting.group.all_reduce("sum", {"a": [value()]})
    assert setting.far.rings == []


def test_tensors_on_a_gpu_are_refused_where_there_is_none(make: Any) -> None:
    with torch._subclasses.fake_tensor.FakeTensorMode():  # a tensor that says so, without a GPU
        value = torch.empty(3, device="cuda")
    with pytest.raises(TypeError, match="on a GPU, which this process cannot copy"):
        make().group.all_reduce("sum", value)


def test_tensors_over_worker_memory_go_in_without_a_copy(make: Any) -> None:
    setting = make()
    memory = setting.memory.empty((4, 6), np.dtype(np.float32))
    memory[:] = 1
    whole = torch.from_numpy(memory)
    for value in (whole, whole[1:], whole.reshape(-1)[3:5], torch.nn.Parameter(whole), torch.from_dlpack(memory)):
        assert torch.all(setting.group.all_reduce("sum", value) == 2)
    setting.group.all_reduce("sum", whole[:, 1:])
    assert [ring.staged for ring in setting.far.rings] == [False] * 5 + [True]
    (_, start), (_, part) = (ring.addresses[0] for ring in setting.far.rings[:2])
    assert part == start + 24


def test_worker_memory_is_given_as_a_tensor(worker: Any) -> None:
    with cd.connect(worker.address) as session, session.join("train", 2, rank=0) as group:
        like = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
        for tensor, shape, dtype in (
            (session.empty(like=like), (2, 3), torch.bfloat16),
            (session.empty((4,), torch.int16, like=like), (4,), torch.int16),
            (session.empty((), "complex64", like=torch), (), torch.complex64),
            (session.empty(like.shape, like=torch), (2, 3), torch.float32),
        ):
            assert type(tensor) is torch.Tensor and tensor.shape == shape and tensor.dtype is dtype
            tensor.fill_(3)
            assert torch.all(group.all_reduce("sum", tensor) == 6)
        assert [ring.staged for ring in worker.far.rings] == [False] * 4
        with torch.device("meta"):
            array = session.empty((2,), torch.bfloat16)
        assert type(array) is np.ndarray and array.dtype == ml_dtypes.bfloat16
        with pytest.raises(TypeError, match="collectives do not carry torch.float8_e4m3fn: expected one of bool, int8"):
            session.empty(2, torch.float8_e4m3fn)


def test_a_view_to_write_into_is_given_of_tensors() -> None:
    for kind in (torch.float32, torch.bfloat16):
        tensor = torch.nn.Parameter(torch.zeros(2, 3, dtype=kind))
        leaves.writable_view(tensor)[:, ::2] = 5
        assert tensor.tolist() == [[5, 0, 5], [5, 0, 5]]
    for value, says in (
        (torch.zeros(1).expand(3), "share memory, as .expand"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "conjugation or negation pending"),
    ):
        with pytest.raises(ValueError, match=f"{says}.*it cannot be written"):
            leaves.writable_view(value)
    with pytest.raises(leaves.UnknownLeaf, match="without data"):
        leaves.writable_view(torch.empty(3, device="meta"))


def test_the_hook_gives_a_future_of_the_buffer(make: Any) -> None:
    hook = allreduce_hook(make().group)
    for kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        buffer = torch.arange(5).to(kind)
        future = hook(None, SimpleNamespace(buffer=lambda buffer=buffer: buffer))
        assert future.wait() is buffer and buffer.tolist() == [0, 1, 2, 3, 4]


def test_the_hooks_future_raises_the_collectives_error_to_whoever_waits_or_goes_on(make: Any) -> None:
    setting = make()
    verdict = setting.far.verdict(Code.ABORTED, "rank 1 aborted", 0)
    setting.far.answer = lambda ring: [setting.far.failed(ring.instance, verdict)]
    hook = allreduce_hook(setting.group)
    for _ in range(2):  # in flight, and refused at once because the generation is over
        future = hook(None, SimpleNamespace(buffer=lambda: torch.ones(3)))
        with pytest.raises(cd.errors.AbortedError, match="rank 1 aborted"):
            future.wait()
        with pytest.raises(RuntimeError, match="rank 1 aborted"):
            future.then(lambda done: done.value()).wait()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank, as DDP wants one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def model(hook: Any) -> Any:
    made = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    made.register_comm_hook(None, hook)
    return made


@pytest.mark.usefixtures("alone")
def test_backward_raises_the_collectives_error_and_the_model_goes_on_where_the_group_does(make: Any) -> None:
    setting = make()
    far = setting.far
    verdict = far.verdict(Code.INVALID_ARGUMENT, "rank 1 differs", 0, successor=101)
    far.answer = lambda ring: [far.failed(ring.instance, verdict)] if ring.generation == 100 else None
    network = model(allreduce_hook(setting.group))
    with pytest.raises(cd.errors.InvalidArgumentError, match="rank 1 differs"):
        network(torch.ones(1, 3)).sum().backward()
    network.zero_grad()
    network(torch.ones(1, 3)).sum().backward()
    assert network.module.weight.grad.tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.usefixtures("alone")
def test_backward_raises_what_is_wrong_with_a_bucket(make: Any) -> None:
    network = torch.nn.Embedding(5, 2, sparse=True)
    ddp = torch.nn.parallel.DistributedDataParallel(network)
    ddp.register_comm_hook(None, allreduce_hook(make().group))
    with pytest.raises(TypeError, match=r"sparse_coo: send its .to_dense"):
        ddp(torch.tensor([1, 2])).sum().backward()


@pytest.mark.usefixtures("alone")
def test_ctrl_c_is_heard_while_backward_waits_for_the_others(make: Any) -> None:
    setting = make()
    caller = threading.get_ident()
    pressed: list[float] = []

    def waiting() -> bool:
        frame = sys._current_frames()[caller]
        while frame.f_back is not None and frame.f_code is not Doorbell.wait.__code__:
            frame = frame.f_back
        return frame.f_code is Doorbell.wait.__code__

    def press(ring: messages.Submit) -> list[bytes]:
        end = time.monotonic() + 10
        while not waiting() and time.monotonic() < end:
            pass
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        return []

    setting.far.answer = press
    network = model(allreduce_hook(setting.group))
    with pytest.raises(KeyboardInterrupt):
        network(torch.ones(1, 3)).sum().backward()
    assert time.monotonic() - pressed[0] < 0.5
    setting.far.until(lambda: (messages.MessageType.ABORT, "interrupted on rank 0") in setting.far.texts)


@pytest.mark.parametrize(("device", "name"), [("cpu:1", "cpu:1"), ("cpu", "cpu"), ("cuda:0", "cuda:0")])
def test_a_device_of_torch_has_a_name_for_workers(device: str, name: str) -> None:
    assert libraries.device_name(torch.device(device)) == name
    assert libraries.device_name(device) == name and libraries.device_name(torch.ones(1)) is None


def test_a_size_is_summed_and_has_no_mean(make: Any) -> None:
    setting = make()
    with pytest.raises(TypeError, match="the value is a Size, which cannot be made of the results in it"):
        setting.group.all_reduce("mean", torch.Size([2, 3]))
    assert setting.far.rings == []
    assert setting.group.all_reduce("sum", torch.Size([2, 3])) == torch.Size([4, 6])
