"""NCCL by nccl4py, through its raw layer `nccl.bindings`.

That layer is not promised to stay as it is, so the version is pinned in pyproject.toml, and the tests compare what
arrives in a libnccl of their own. Its layer `nccl.core` is avoided: it imports torch, where there is one, to look at
every buffer.
"""

from __future__ import annotations

from typing import Any

from nccl.bindings import nccl as raw

from collectived_runtime.device.nccl.handles import HandleTable
from collectived_runtime.device.nccl.interface import (
    UNIQUE_ID_BYTES,
    Capabilities,
    NcclBlock,
    NcclBuffers,
    NcclError,
    NcclOperation,
    check_ready,
    make_error,
)

MOST = (1 << 63) - 1


class Nccl4py:
    """See `interface.Nccl`."""

    name = "nccl4py"
    capabilities = Capabilities(nonblocking=True, max_count=MOST)

    def __init__(self) -> None:
        self._communicators: HandleTable[Any] = HandleTable()
        raw.get_version()  # raises where there is no libnccl

    def version(self) -> int:
        return int(raw.get_version())

    def create_unique_id(self) -> bytes:
        return bytes(memoryview(self._call("get_unique_id")).cast("B"))

    def init(self, size: int, unique_id: bytes, rank: int, *, blocking: bool) -> int:
        how = raw.Config()
        how.blocking = int(blocking)
        shared = raw.UniqueId.from_buffer(bytearray(unique_id[:UNIQUE_ID_BYTES]))
        return self._communicators.add(self._call("comm_init_rank_config", size, shared, rank, how))

    def is_ready(self, communicator: int) -> bool:
        return check_ready(int(self._call_on(communicator, "comm_get_async_error")), "a communicator has failed")

    def all_reduce(self, buffers: NcclBuffers, op: NcclOperation, communicator: int, stream: int) -> None:
        comm = self._communicators[communicator]
        self._call("all_reduce", *buffers, int(op), comm, stream)

    def reduce(self, buffers: NcclBuffers, op: NcclOperation, root: int, communicator: int, stream: int) -> None:
        comm = self._communicators[communicator]
        self._call("reduce", *buffers, int(op), root, comm, stream)

    def broadcast(self, buffers: NcclBuffers, root: int, communicator: int, stream: int) -> None:
        self._call("broadcast", *buffers, root, self._communicators[communicator], stream)

    def all_gather(self, buffers: NcclBuffers, communicator: int, stream: int) -> None:
        self._call("all_gather", *buffers, self._communicators[communicator], stream)

    def reduce_scatter(self, buffers: NcclBuffers, op: NcclOperation, communicator: int, stream: int) -> None:
        self._call("reduce_scatter", *buffers, int(op), self._communicators[communicator], stream)

    def send(self, block: NcclBlock, peer: int, communicator: int, stream: int) -> None:
        self._call("send", *block, peer, self._communicators[communicator], stream)

    def recv(self, block: NcclBlock, peer: int, communicator: int, stream: int) -> None:
        self._call("recv", *block, peer, self._communicators[communicator], stream)

    def group_start(self) -> None:
        self._call("group_start")

    def group_end(self) -> None:
        self._call("group_end")

    def abort(self, communicator: int) -> None:
        self._call("comm_abort", self._communicators.pop(communicator))

    def destroy(self, communicator: int) -> None:
        self._call("comm_destroy", self._communicators.pop(communicator))

    def _call_on(self, communicator: int, call: str) -> Any:
        return self._call(call, self._communicators[communicator])

    def _call(self, call: str, *arguments: Any) -> Any:
        try:
            return getattr(raw, call)(*arguments)
        except raw.NCCLError as refused:
            raise _translate_error(refused, call) from None


def _translate_error(refused: Any, call: str) -> NcclError:
    return make_error(int(refused.status), call, raw.get_error_string(int(refused.status)))
