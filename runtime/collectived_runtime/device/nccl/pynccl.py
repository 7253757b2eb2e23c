"""NCCL by pynccl 0.1.2, a wrapper of 2020 that still loads.

Guarded here against what is wrong in it: counts are 32-bit integers there, so that larger ones would silently become
others; its check of results knows neither 7 nor 8 and misnames 6, so results are read past it; it finds libnccl only in
the folder that NUMBA_NCCLLIB names; and its unique id is four times too long. It knows no configuration, so `init`
blocks until all ranks have come.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, TypeVar

from collectived_runtime.device.nccl.handles import HandleTable
from collectived_runtime.device.nccl.interface import (
    UNIQUE_ID_BYTES,
    Capabilities,
    NcclBlock,
    NcclBuffers,
    NcclOperation,
    NcclResult,
    check_ready,
    make_error,
)
from collectived_runtime.device.nccl.library import find_nccl_folder

MOST = (1 << 31) - 1


class Pynccl:
    """See `interface.Nccl`."""

    name = "pynccl"
    capabilities = Capabilities(nonblocking=False, max_count=MOST)

    def __init__(self) -> None:
        found = find_nccl_folder()
        if found is not None:
            os.environ.setdefault("NUMBA_NCCLLIB", found)
        from pynccl import binding  # reads that variable

        try:
            self._raw: Any = binding.libnccl().dll  # its functions with their types, and the results as they are
        except Exception as missing:  # it raises nothing narrower
            raise ImportError(f"pynccl found no libnccl: {missing}; name its folder in NUMBA_NCCLLIB") from None
        self._unique_id: Any = binding.ncclUniqueId
        self._raw.ncclGetErrorString.restype = ctypes.c_char_p
        self._communicators: HandleTable[Any] = HandleTable()

    def version(self) -> int:
        version = ctypes.c_int()
        self._raw.ncclGetVersion(ctypes.byref(version))
        return version.value

    def create_unique_id(self) -> bytes:
        minted = self._unique_id()
        self._call("ncclGetUniqueId", ctypes.byref(minted))
        return bytes(minted)[:UNIQUE_ID_BYTES]

    def init(self, size: int, unique_id: bytes, rank: int, *, blocking: bool) -> int:
        if not blocking:
            raise make_error(NcclResult.INVALID_USAGE, "init", "pynccl makes no communicator without blocking")
        comm = ctypes.c_void_p()
        shared = self._unique_id.from_buffer_copy(unique_id.ljust(ctypes.sizeof(self._unique_id), b"\0"))
        self._call("ncclCommInitRank", ctypes.byref(comm), size, shared, rank)
        return self._communicators.add(comm)

    def is_ready(self, communicator: int) -> bool:
        state = ctypes.c_int()
        self._call("ncclCommGetAsyncError", self._communicators[communicator], ctypes.byref(state))
        return check_ready(state.value, "a communicator has failed")

    def all_reduce(self, buffers: NcclBuffers, op: NcclOperation, communicator: int, stream: int) -> None:
        comm = self._communicators[communicator]
        self._call("ncclAllReduce", *_checked(buffers), int(op), comm, stream)

    def reduce(self, buffers: NcclBuffers, op: NcclOperation, root: int, communicator: int, stream: int) -> None:
        comm = self._communicators[communicator]
        self._call("ncclReduce", *_checked(buffers), int(op), root, comm, stream)

    def broadcast(self, buffers: NcclBuffers, root: int, communicator: int, stream: int) -> None:
        comm = self._communicators[communicator]
        self._call("ncclBroadcast", *_checked(buffers), root, comm, stream)

    def all_gather(self, buffers: NcclBuffers, communicator: int, stream: int) -> None:
        self._call("ncclAllGather", *_checked(buffers), self._communicators[communicator], stream)

    def reduce_scatter(self, buffers: NcclBuffers, op: NcclOperation, communicator: int, stream: int) -> None:
        self._call("ncclReduceScatter", *_checked(buffers), int(op), self._communicators[communicator], stream)

    def send(self, block: NcclBlock, peer: int, communicator: int, stream: int) -> None:
        self._call("ncclSend", *_checked(block), peer, self._communicators[communicator], stream)

    def recv(self, block: NcclBlock, peer: int, communicator: int, stream: int) -> None:
        self._call("ncclRecv", *_checked(block), peer, self._communicators[communicator], stream)

    def group_start(self) -> None:
        self._call("ncclGroupStart")

    def group_end(self) -> None:
        self._call("ncclGroupEnd")

    def abort(self, communicator: int) -> None:
        self._call("ncclCommAbort", self._communicators.pop(communicator))

    def destroy(self, communicator: int) -> None:
        self._call("ncclCommDestroy", self._communicators.pop(communicator))

    def _call(self, call: str, *arguments: Any) -> None:
        code = int(getattr(self._raw, call)(*arguments))
        if code not in (NcclResult.SUCCESS, NcclResult.IN_PROGRESS):
            said = self._raw.ncclGetErrorString(code)
            raise make_error(code, call, said.decode(errors="replace") if said else "")


_Buffers = TypeVar("_Buffers", NcclBuffers, NcclBlock)


def _checked(buffers: _Buffers) -> _Buffers:
    if buffers.elements > MOST:
        why = f"{buffers.elements} elements, and pynccl takes {MOST} in one call"
        raise make_error(NcclResult.INVALID_ARGUMENT, "a collective", why)
    return buffers
