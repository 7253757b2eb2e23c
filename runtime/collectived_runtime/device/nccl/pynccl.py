"""NCCL by pynccl 0.1.2, a wrapper of 2020 that still loads.

Guarded here against what is wrong in it: counts are 32-bit integers there, so that larger ones would silently become
others; its check of results knows neither 7 nor 8 and misnames 6, so results are read past it; it finds libnccl only in
the folder that NUMBA_NCCLLIB names; and its unique id is four times too long. It knows no configuration, so `init`
blocks until all ranks have come.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from collectived_runtime.device.nccl.interface import (
    UNIQUE_ID_BYTES,
    Capabilities,
    DataType,
    Operation,
    Result,
    error,
    state_of,
)
from collectived_runtime.device.nccl.kept import Kept
from collectived_runtime.device.nccl.library import folder

MOST = (1 << 31) - 1


class Pynccl:
    """See `interface.Nccl`."""

    name = "pynccl"
    capabilities = Capabilities(nonblocking=False, max_count=MOST)

    def __init__(self) -> None:
        found = folder()
        if found is not None:
            os.environ.setdefault("NUMBA_NCCLLIB", found)
        from pynccl import binding  # reads that variable

        try:
            self._raw: Any = binding.libnccl().dll  # its functions with their types, and the results as they are
        except Exception as missing:  # it raises nothing narrower
            raise ImportError(f"pynccl found no libnccl: {missing}; name its folder in NUMBA_NCCLLIB") from None
        self._unique_id: Any = binding.ncclUniqueId
        self._raw.ncclGetErrorString.restype = ctypes.c_char_p
        self._communicators: Kept[Any] = Kept()

    def version(self) -> int:
        version = ctypes.c_int()
        self._raw.ncclGetVersion(ctypes.byref(version))
        return version.value

    def unique_id(self) -> bytes:
        minted = self._unique_id()
        self._do("ncclGetUniqueId", ctypes.byref(minted))
        return bytes(minted)[:UNIQUE_ID_BYTES]

    def init(self, size: int, unique_id: bytes, rank: int, *, blocking: bool) -> int:
        if not blocking:
            raise error(Result.INVALID_USAGE, "init", "pynccl makes no communicator without blocking")
        comm = ctypes.c_void_p()
        shared = self._unique_id.from_buffer_copy(unique_id.ljust(ctypes.sizeof(self._unique_id), b"\0"))
        self._do("ncclCommInitRank", ctypes.byref(comm), size, shared, rank)
        return self._communicators.keep(comm)

    def ready(self, communicator: int) -> bool:
        state = ctypes.c_int()
        self._do("ncclCommGetAsyncError", self._communicators[communicator], ctypes.byref(state))
        return state_of(state.value, "a communicator has failed")

    def all_reduce(
        self, send: int, receive: int, count: int, dtype: DataType, op: Operation, communicator: int, stream: int
    ) -> None:
        comm = self._communicators[communicator]
        self._do("ncclAllReduce", send, receive, _checked(count), int(dtype), int(op), comm, stream)

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
        self._do("ncclReduce", send, receive, _checked(count), int(dtype), int(op), root, comm, stream)

    def broadcast(
        self, send: int, receive: int, count: int, dtype: DataType, root: int, communicator: int, stream: int
    ) -> None:
        comm = self._communicators[communicator]
        self._do("ncclBroadcast", send, receive, _checked(count), int(dtype), root, comm, stream)

    def abort(self, communicator: int) -> None:
        self._do("ncclCommAbort", self._communicators.let_go(communicator))

    def destroy(self, communicator: int) -> None:
        self._do("ncclCommDestroy", self._communicators.let_go(communicator))

    def _do(self, call: str, *arguments: Any) -> None:
        code = int(getattr(self._raw, call)(*arguments))
        if code not in (Result.SUCCESS, Result.IN_PROGRESS):
            said = self._raw.ncclGetErrorString(code)
            raise error(code, call, said.decode(errors="replace") if said else "")


def _checked(count: int) -> int:
    if count > MOST:
        raise error(Result.INVALID_ARGUMENT, "a collective", f"{count} elements, and pynccl takes {MOST} in one call")
    return count
