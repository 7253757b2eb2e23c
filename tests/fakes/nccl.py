"""NCCL without a GPU: ranks meet at a socket of whoever minted the id, and what they bring is folded there.

Ranks may be in several processes, for the worker that mints an id has a thread per communicator. Over a `FakeCuda` a
collective is a kernel: it begins when its stream comes to it, the stream goes on when all ranks have come, and where
one is gone it never does, which `ready` tells and `abort` ends. Devices, streams and addresses must belong together.
What is sent and received in a group is one kernel too, for which all ranks have to come.
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
from dataclasses import dataclass
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
    NcclBlock,
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
        self._groups = threading.local()  # `open`: what a thread has called in its group; none: it has none

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
        number = self._ends.add(_End(connection, rank, size))
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

    def all_gather(self, buffers: NcclBuffers, communicator: int, stream: int) -> None:
        self._call(b"all_gath", buffers, NcclOperation.SUM, -1, communicator, stream)

    def reduce_scatter(self, buffers: NcclBuffers, op: NcclOperation, communicator: int, stream: int) -> None:
        self._call(b"reduce_s", buffers, op, -1, communicator, stream)

    def send(self, block: NcclBlock, peer: int, communicator: int, stream: int) -> None:
        self._post("send", block, peer, communicator, stream)

    def recv(self, block: NcclBlock, peer: int, communicator: int, stream: int) -> None:
        self._post("recv", block, peer, communicator, stream)

    def group_start(self) -> None:
        self._groups.open = []

    def group_end(self) -> None:
        posted, self._groups.open = self._groups.open, None
        if posted:
            self._exchange(posted)

    def _post(self, kind: str, block: NcclBlock, peer: int, communicator: int, stream: int) -> None:
        if getattr(self._groups, "open", None) is None:
            raise NcclUsageError(NcclResult.INVALID_USAGE, kind, "the fake sends and receives in groups alone")
        self._check_call(kind, block.elements, communicator)
        self._groups.open.append(_Post(kind, block, peer, communicator, stream))

    def _exchange(self, posted: list[_Post]) -> None:
        (communicator,), (stream,) = {one.communicator for one in posted}, {one.stream for one in posted}
        cuda, end = self._cuda, self._ends[communicator]
        assert cuda is not None, "groups are for streams"
        by_peer = sorted(posted, key=lambda one: one.peer)  # in the order of calls for each
        places = [(one, cuda.reachable(one.block.address, one.nbytes, stream)) for one in by_peer]
        sizes = [
            sum(one.nbytes for one in posted if (one.kind, one.peer) == ("send", peer)) for peer in range(end.size)
        ]
        into = view_of(bytearray(sum(one.nbytes for one in posted if one.kind == "recv")))

        def read() -> bytes:
            sent = [place.tobytes() for one, place in places if one.kind == "send"]
            return b"".join((struct.pack(f"<{end.size}q", *sizes), *sent))

        def scatter() -> None:
            at = 0
            for one, place in places:
                if one.kind == "recv":
                    place[:] = into[at : at + one.nbytes]
                    at += one.nbytes

        header = _CALL.pack(b"exchange", NcclDataType.UINT8, NcclOperation.SUM, -1, 0)
        self._launch(end, header, read, into, stream, scatter)

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
        end = self._check_call(kind.decode().strip(), count, communicator)
        nbytes = count * _numpy(dtype).itemsize
        brings, takes = (nbytes * times for times in _count_parts(kind, end, root))
        header = _CALL.pack(kind, dtype, op, root, count)
        if self._cuda is None:
            end.ask(header + (view(send, brings).tobytes() if brings else b""), view(receive, takes))
            return
        source = self._cuda.reachable(send, brings, stream) if brings else view_of(bytearray())
        into = self._cuda.reachable(receive, takes, stream) if takes else view_of(bytearray())
        self._launch(end, header, source.tobytes, into, stream)

    def _check_call(self, kind: str, count: int, communicator: int) -> _End:
        """The end of a communicator that takes this call, of which note is taken."""
        if count > self.capabilities.max_count:
            raise NcclUsageError(NcclResult.INVALID_ARGUMENT, "a collective", f"{count} elements")
        end = self._ends[communicator]
        self._check()
        self.calls.append((kind, count))
        if self._calls_in is not None:
            with self._calls_in.open("ab") as file:
                file.write(kind.encode() + b"\n")
        return end

    def _launch(
        self,
        end: _End,
        header: bytes,
        read: Callable[[], bytes],
        into: NDArray[np.uint8],
        stream: int,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        cuda = self._cuda
        assert cuda is not None
        if end.device != cuda.current():
            raise NcclUsageError(NcclResult.INVALID_USAGE, "a collective", f"GPU {cuda.current()} is current")
        cuda.enqueue("ncclKernel", stream, self._kernel(end, header, read, into, finish))
        end.launched = True

    def _kernel(
        self,
        end: _End,
        header: bytes,
        read: Callable[[], bytes],
        into: NDArray[np.uint8],
        finish: Callable[[], None],
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
                    end.ask(header + read(), into)
                over = end.step()
            except NcclRemoteError as error:
                end.failed = error
                return False
            if over:
                finish()
            return over

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


@dataclass(frozen=True, slots=True)
class _Post:
    """A send or recv in a group."""

    kind: str
    block: NcclBlock
    peer: int
    communicator: int
    stream: int

    @property
    def nbytes(self) -> int:
        return self.block.elements * _numpy(self.block.dtype).itemsize


def _count_parts(kind: bytes, end: _End, root: int) -> tuple[int, int]:
    """How often a rank brings, and takes, what its call counts."""
    if kind == b"broadcas":
        return int(end.rank == root), 1
    if kind == b"reduce  ":
        return 1, int(end.rank == root)
    return (end.size if kind == b"reduce_s" else 1), (end.size if kind == b"all_gath" else 1)


class _End:
    """One rank's end: what is still to be sent, and where the answer goes."""

    def __init__(self, connection: socket.socket, rank: int, size: int) -> None:
        self.connection = connection
        self.rank = rank
        self.size = size
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
    sent: dict[int, list[bytes]] = {}  # by who sends, to each
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
        if kind == b"exchange":
            sizes = struct.unpack(f"<{len(ranks)}q", _all(one, 8 * len(ranks)))
            sent[number] = [_all(one, size) for size in sizes]
            continue
        if kind == b"reduce_s":
            count *= len(ranks)
        if kind != b"broadcas" or number == root:
            brought[number] = np.frombuffer(_all(one, count * _numpy(dtype).itemsize), _numpy(dtype))
    kind, dtype, op, root, count = _CALL.unpack(first)
    if kind == b"exchange":
        for number, one in enumerate(ranks):
            one.sendall(b"".join(sent[source][number] for source in range(len(ranks))))
        return
    if kind == b"all_gath":
        for one in ranks:
            one.sendall(b"".join(brought[number].tobytes() for number in range(len(ranks))))
        return
    total = brought[min(brought)].copy()
    for number in sorted(brought)[1:]:
        total = _FOLDS[NcclOperation(op)](total, brought[number])
    if op == NcclOperation.AVERAGE:
        total = (total / len(ranks)).astype(total.dtype)
    for number, one in enumerate(ranks):
        if kind == b"reduce_s":
            one.sendall(total[number * count : (number + 1) * count].tobytes())
        elif kind != b"reduce  " or number == root:
            one.sendall(total.tobytes())


def _all(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        got = connection.recv(min(count - len(found), 1 << 20))
        if not got:
            raise EOFError
        found += got
    return found
