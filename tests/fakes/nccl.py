"""NCCL without a GPU: ranks meet at a socket of whoever minted the id, and what they bring is folded there.

Ranks may be in several processes, for the worker that mints an id has a thread per communicator. Over a `FakeCuda` a
collective is a kernel: it begins when its stream comes to it, the stream goes on when all ranks have come, and where
one is gone it never does, which `ready` tells and `abort` ends. Devices, streams and addresses must belong together.
Without one, addresses are of host memory, and a collective takes effect while its communicator is in progress. Nothing
waits for others but `init` with `blocking`, and an `abort` that a test holds up.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.fakes.cuda import FakeCuda

from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import DType
from collectived_runtime.device.nccl.handles import HandleTable
from collectived_runtime.device.nccl.interface import (
    UNIQUE_ID_BYTES,
    Capabilities,
    NcclBuffers,
    NcclDataType,
    NcclError,
    NcclOperation,
    NcclRemoteError,
    NcclResult,
    NcclUsageError,
)

_HELLO = struct.Struct("<ii")  # size, rank
_CALL = struct.Struct("<8siiiq")  # kind, element type, operation, root, count
_GO = b"go"
_FOLDS = {
    NcclOperation.SUM: np.add,
    NcclOperation.AVERAGE: np.add,
    NcclOperation.PRODUCT: np.multiply,
    NcclOperation.MAX: np.maximum,
    NcclOperation.MIN: np.minimum,
}
_minted = itertools.count()


def view(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Those bytes of this process's memory."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)


class FakeNccl:
    """An `interface.Nccl`.

    Args:
        init_hold: while this file is there, no communicator becomes ready, and no kernel comes to its end.
        abort_hold: while this file is there, no abort returns.
        broken_by: while this file is there, it fails here and now: every collective, and every communicator.
        calls_in: a file that gets a line for each collective that it is given, for tests in other processes: its kind.
        blocking: whether it can only make communicators by blocking, as some bindings.
        most: elements of one call.
        cuda: whose streams collectives run on.
    """

    name = "fake"

    def __init__(
        self,
        init_hold: Path | None = None,
        abort_hold: Path | None = None,
        *,
        blocking: bool = False,
        most: int = (1 << 63) - 1,
        cuda: FakeCuda | None = None,
        broken_by: Path | None = None,
        calls_in: Path | None = None,
    ) -> None:
        self.capabilities = Capabilities(nonblocking=not blocking, max_count=most)
        self._init_hold = init_hold
        self._abort_hold = abort_hold
        self._cuda = cuda
        self._broken_by = broken_by
        self._calls_in = calls_in
        self.broken = False  # the same as that file
        self.stuck = False  # while it is true no collective comes to its end here
        self._ends: HandleTable[_End] = HandleTable()
        self._open: list[socket.socket] = []
        self.inits: list[int] = []  # ranks for which one was begun
        self.freed: list[tuple[str, int]] = []  # how, and which rank
        self.calls: list[tuple[str, int]] = []  # kind and count

    def version(self) -> int:
        return 22809

    def create_unique_id(self) -> bytes:
        name = f"\0collectived-nccl-{os.getpid()}-{next(_minted)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(name)
        listener.listen(64)
        self._open.append(listener)
        threading.Thread(target=_meet, args=(listener,), name="fake nccl", daemon=True).start()
        return name.encode().ljust(UNIQUE_ID_BYTES, b" ")

    def init(self, size: int, unique_id: bytes, rank: int, *, blocking: bool) -> int:
        if blocking is self.capabilities.nonblocking:
            raise NcclUsageError(NcclResult.INVALID_USAGE, "init", f"blocking={blocking}")
        self.inits.append(rank)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(unique_id.rstrip(b" ").decode())
        except OSError as error:
            connection.close()
            raise NcclRemoteError(NcclResult.REMOTE_ERROR, "init", str(error)) from None
        self._open.append(connection)
        connection.setblocking(False)
        number = self._ends.add(_End(connection, rank))
        end = self._ends[number]
        end.device = self._cuda.current() if self._cuda is not None else -1
        end.ask(_HELLO.pack(size, rank), view_of(bytearray(len(_GO))))
        while blocking and not self.is_ready(number):
            threading.Event().wait(0.001)
        return number

    def is_ready(self, communicator: int) -> bool:
        end = self._ends[communicator]
        self._check()
        if end.failed is not None:
            raise end.failed
        if end.launched:
            return True
        return not self._held and end.step()

    def _check(self) -> None:
        if self.broken or (self._broken_by is not None and self._broken_by.exists()):
            raise NcclError(NcclResult.SYSTEM_ERROR, "a collective", "as the test wants it")

    @property
    def _held(self) -> bool:
        return self.stuck or (self._init_hold is not None and self._init_hold.exists())

    def all_reduce(self, buffers: NcclBuffers, op: NcclOperation, communicator: int, stream: int) -> None:
        self._call(b"all_redu", buffers, op, -1, communicator, stream)

    def reduce(self, buffers: NcclBuffers, op: NcclOperation, root: int, communicator: int, stream: int) -> None:
        self._call(b"reduce  ", buffers, op, root, communicator, stream)

    def broadcast(self, buffers: NcclBuffers, root: int, communicator: int, stream: int) -> None:
        self._call(b"broadcas", buffers, NcclOperation.SUM, root, communicator, stream)

    def abort(self, communicator: int) -> None:
        self._free("abort", communicator)

    def destroy(self, communicator: int) -> None:
        self._free("destroy", communicator)

    def close(self) -> None:
        """After a test: ends whatever it has left."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # who waits there is woken
            one.close()

    def _call(
        self,
        kind: bytes,
        buffers: NcclBuffers,
        op: NcclOperation,
        root: int,
        communicator: int,
        stream: int,
    ) -> None:
        send, receive, count, dtype = buffers
        if count > self.capabilities.max_count:
            raise NcclUsageError(NcclResult.INVALID_ARGUMENT, "a collective", f"{count} elements")
        end = self._ends[communicator]
        self._check()
        self.calls.append((kind.decode().strip(), count))
        if self._calls_in is not None:
            with self._calls_in.open("ab") as file:
                file.write(kind.strip() + b"\n")
        nbytes = count * _numpy(dtype).itemsize
        brings = kind != b"broadcas" or end.rank == root
        takes = kind != b"reduce  " or end.rank == root
        header = _CALL.pack(kind, dtype, op, root, count)
        if self._cuda is None:
            payload = view(send, nbytes).tobytes() if brings else b""
            end.ask(header + payload, view(receive, nbytes if takes else 0))
            return
        if end.device != self._cuda.current():
            raise NcclUsageError(NcclResult.INVALID_USAGE, "a collective", f"GPU {self._cuda.current()} is current")
        source = self._cuda.reachable(send, nbytes, stream) if brings else view_of(bytearray())
        into = self._cuda.reachable(receive, nbytes, stream) if takes else view_of(bytearray())
        self._cuda.enqueue("ncclKernel", stream, self._kernel(end, header, source, into))
        end.launched = True

    def _kernel(
        self, end: _End, header: bytes, source: NDArray[np.uint8], into: NDArray[np.uint8]
    ) -> Callable[[], bool]:
        begun = False

        def step() -> bool:
            nonlocal begun
            if end.freed:
                return True
            if self._held or end.failed is not None:
                return False
            try:
                if not begun:
                    begun = True
                    end.ask(header + source.tobytes(), into)
                return end.step()
            except NcclRemoteError as error:
                end.failed = error
                return False

        return step

    def _free(self, how: str, communicator: int) -> None:
        end = self._ends.pop(communicator)
        while self._abort_hold is not None and self._abort_hold.exists():
            threading.Event().wait(0.001)
        end.freed = True
        end.connection.close()
        self.freed.append((how, end.rank))


def view_of(room: bytearray) -> NDArray[np.uint8]:
    return np.frombuffer(room, np.uint8)


class _End:
    """One rank's end: what is still to be sent, and where the answer goes."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.connection = connection
        self.rank = rank
        self.device = -1
        self.launched = False  # whether a kernel has been: from then on it is ready for more
        self.freed = False
        self.failed: NcclRemoteError | None = None
        self._out = b""
        self._into = view_of(bytearray())
        self._at = 0

    def ask(self, message: bytes, into: NDArray[np.uint8]) -> None:
        self._out, self._into, self._at = message, into, 0
        self.step()

    def step(self) -> bool:
        """Whether all has been sent and the answer is there."""
        try:
            if self._out:
                self._out = self._out[self.connection.send(self._out) :]
            while not self._out and self._at < len(self._into):
                got = self.connection.recv_into(self._into[self._at :].data)
                if not got:
                    raise NcclRemoteError(NcclResult.REMOTE_ERROR, "a collective", "a rank is gone")
                self._at += got
        except BlockingIOError:
            return False
        except OSError as error:
            raise NcclRemoteError(NcclResult.REMOTE_ERROR, "a collective", str(error)) from None
        return not self._out and self._at == len(self._into)


def _numpy(dtype: int) -> np.dtype[Any]:
    return to_numpy(DType[NcclDataType(dtype).name])


def _meet(listener: socket.socket) -> None:
    """All ranks of one communicator, until one of them goes."""
    ranks: dict[int, socket.socket] = {}
    size = -1
    try:
        while len(ranks) != size:
            connection, _ = listener.accept()
            ranks[-1] = connection  # until it has said who it is
            size, rank = _HELLO.unpack(_all(connection, _HELLO.size))
            ranks[rank] = ranks.pop(-1)
        listener.close()
        ordered = [ranks[rank] for rank in range(size)]
        for one in ordered:
            one.sendall(_GO)
        while True:
            _collective(ordered)
    except (EOFError, OSError):
        pass
    finally:
        listener.close()
        for one in ranks.values():
            one.close()


def _collective(ranks: list[socket.socket]) -> None:
    brought: dict[int, NDArray[Any]] = {}
    first = b""
    waiting = select.poll()
    for one in ranks:
        waiting.register(one, select.POLLIN)
    come = {number for number, _ in waiting.poll()}
    if any(one.fileno() in come and not one.recv(1, socket.MSG_PEEK) for one in ranks):
        raise EOFError
    for number, one in enumerate(ranks):
        header = _all(one, _CALL.size)
        first = first or header
        if header != first:  # as with NCCL, nothing good comes of it
            raise EOFError
        kind, dtype, _, root, count = _CALL.unpack(header)
        if kind != b"broadcas" or number == root:
            brought[number] = np.frombuffer(_all(one, count * _numpy(dtype).itemsize), _numpy(dtype))
    kind, dtype, op, root, count = _CALL.unpack(first)
    total = brought[min(brought)].copy()
    for number in sorted(brought)[1:]:
        total = _FOLDS[NcclOperation(op)](total, brought[number])
    if op == NcclOperation.AVERAGE:
        total = (total / len(ranks)).astype(total.dtype)
    for number, one in enumerate(ranks):
        if kind != b"reduce  " or number == root:
            one.sendall(total.tobytes())


def _all(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        got = connection.recv(min(count - len(found), 1 << 20))
        if not got:
            raise EOFError
        found += got
    return found
