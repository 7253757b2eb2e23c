"""NCCL by `cupy.cuda.nccl`, which comes with CuPy.

It knows no configuration, so `init` blocks until all ranks have come. It raises KeyError for results that are newer
than itself, and uses a null pointer after an abort.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupy_backends.cuda.libs import nccl as raw

from collectived_runtime.device.nccl.handles import HandleTable
from collectived_runtime.device.nccl.interface import (
    Capabilities,
    NcclBlock,
    NcclBuffers,
    NcclOperation,
    NcclResult,
    check_ready,
    make_error,
)

MOST = (1 << 63) - 1


class Cupy:
    """See `interface.Nccl`."""

    name = "cupy"
    capabilities = Capabilities(nonblocking=False, max_count=MOST)

    def __init__(self) -> None:
        if not raw.available:
            raise ImportError("CuPy found no libnccl")
        self._communicators: HandleTable[Any] = HandleTable()

    def version(self) -> int:
        return int(raw.get_version())

    def create_unique_id(self) -> bytes:
        minted: bytes = _call("get_unique_id", raw.get_unique_id)
        return minted

    def init(self, size: int, unique_id: bytes, rank: int, *, blocking: bool) -> int:
        if not blocking:
            raise make_error(NcclResult.INVALID_USAGE, "init", "CuPy makes no communicator without blocking")
        return self._communicators.add(_call("init", raw.NcclCommunicator, size, unique_id, rank))

    def is_ready(self, communicator: int) -> bool:
        call = "a communicator has failed"
        try:
            self._communicators[communicator].check_async_error()
        except (raw.NcclError, KeyError) as refused:
            return check_ready(_code(refused), call)
        return True

    def all_reduce(self, buffers: NcclBuffers, op: NcclOperation, communicator: int, stream: int) -> None:
        comm = self._communicators[communicator]
        _call("all_reduce", comm.allReduce, *buffers, int(op), stream)

    def reduce(self, buffers: NcclBuffers, op: NcclOperation, root: int, communicator: int, stream: int) -> None:
        comm = self._communicators[communicator]
        _call("reduce", comm.reduce, *buffers, int(op), root, stream)

    def broadcast(self, buffers: NcclBuffers, root: int, communicator: int, stream: int) -> None:
        comm = self._communicators[communicator]
        _call("broadcast", comm.broadcast, *buffers, root, stream)

    def all_gather(self, buffers: NcclBuffers, communicator: int, stream: int) -> None:
        _call("all_gather", self._communicators[communicator].allGather, *buffers, stream)

    def reduce_scatter(self, buffers: NcclBuffers, op: NcclOperation, communicator: int, stream: int) -> None:
        _call("reduce_scatter", self._communicators[communicator].reduceScatter, *buffers, int(op), stream)

    def send(self, block: NcclBlock, peer: int, communicator: int, stream: int) -> None:
        _call("send", self._communicators[communicator].send, *block, peer, stream)

    def recv(self, block: NcclBlock, peer: int, communicator: int, stream: int) -> None:
        _call("recv", self._communicators[communicator].recv, *block, peer, stream)

    def group_start(self) -> None:
        _call("group_start", raw.groupStart)

    def group_end(self) -> None:
        _call("group_end", raw.groupEnd)

    def abort(self, communicator: int) -> None:
        _call("abort", self._communicators.pop(communicator).abort)

    def destroy(self, communicator: int) -> None:
        _call("destroy", self._communicators.pop(communicator).destroy)


def _call(call: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (raw.NcclError, KeyError) as refused:
        code = _code(refused)
        if code == NcclResult.IN_PROGRESS:  # no error: what has been asked for is under way
            return None
        raise make_error(code, call) from None


def _code(refused: Any) -> int:
    """The result behind an exception of CuPy: for one that it does not know it is the key that was not found."""
    return int(refused.args[0]) if isinstance(refused, KeyError) else int(refused.status)
