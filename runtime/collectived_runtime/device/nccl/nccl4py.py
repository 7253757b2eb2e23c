"""NCCL by nccl4py, through its raw layer `nccl.bindings`.

That layer is not promised to stay as it is, so the version is pinned in pyproject.toml, and the tests compare what
arrives in a libnccl of their own. Its layer `nccl.core` is avoided: it imports torch, where there is one, to look at
every buffer.
"""

from __future__ import annotations

from typing import Any

from nccl.bindings import nccl as raw

from collectived_runtime.device.nccl.interface import (
    UNIQUE_ID_BYTES,
    Capabilities,
    DataType,
    NcclError,
    Operation,
    error,
    state_of,
)
from collectived_runtime.device.nccl.kept import Kept

MOST = (1 << 63) - 1


class Nccl4py:
    """See `interface.Nccl`."""

    name = "nccl4py"
    capabilities = Capabilities(nonblocking=True, max_count=MOST)

    def __init__(self) -> None:
        self._communicators: Kept[Any] = Kept()
        raw.get_version()  # raises where there is no libnccl

    def version(self) -> int:
        return int(raw.get_version())

    def unique_id(self) -> bytes:
        return bytes(memoryview(self._do("get_unique_id")).cast("B"))

    def init(self, size: int, unique_id: bytes, rank: int, *, blocking: bool) -> int:
        how = raw.Config()
        how.blocking = int(blocking)
        shared = raw.UniqueId.from_buffer(bytearray(unique_id[:UNIQUE_ID_BYTES]))
        return self._communicators.keep(self._do("comm_init_rank_config", size, shared, rank, how))

    def ready(self, communicator: int) -> bool:
        return state_of(int(self._on(communicator, "comm_get_async_error")), "a communicator has failed")

    def all_reduce(
        self, send: int, receive: int, count: int, dtype: DataType, op: Operation, communicator: int, stream: int
    ) -> None:
        comm = self._communicators[communicator]
        self._do("all_reduce", send, receive, count, int(dtype), int(op), comm, stream)

    def reduce(
        self,
        send: int,
        receive: int,
        count: int,
        dtype: DataType,
        op: Operation,
        root: int,
        communicator: int,
        stream: int,
    ) -> None:
        comm = self._communicators[communicator]
        self._do("reduce", send, receive, count, int(dtype), int(op), root, comm, stream)

    def broadcast(
        self, send: int, receive: int, count: int, dtype: DataType, root: int, communicator: int, stream: int
    ) -> None:
        self._do("broadcast", send, receive, count, int(dtype), root, self._communicators[communicator], stream)

    def abort(self, communicator: int) -> None:
        self._do("comm_abort", self._communicators.let_go(communicator))

    def destroy(self, communicator: int) -> None:
        self._do("comm_destroy", self._communicators.let_go(communicator))

    def _on(self, communicator: int, call: str) -> Any:
        return self._do(call, self._communicators[communicator])

    def _do(self, call: str, *arguments: Any) -> Any:
        try:
            return getattr(raw, call)(*arguments)
        except raw.NCCLError as refused:
            raise _translated(refused, call) from None


def _translated(refused: Any, call: str) -> NcclError:
    return error(int(refused.status), call, raw.get_error_string(int(refused.status)))
