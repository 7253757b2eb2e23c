"""One `Submit` from its header to its last result, in a thread of the library's.

As in `rpc_thread`, nothing of gRPC is called in a thread of the caller's, where Ctrl-C may come. Results are put where
a worker of this host would have put them.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived.calls.prepare import PreparedCall
from collectived.connection.rpc_thread import fork_lock
from collectived.grpc_alone.heap import Block
from collectived_proto.ipc.result_header import Pieces, ResultHeader
from collectived_proto.types import DType
from collectived_proto.v1 import common_pb2, worker_pb2

CHUNK_BYTES = 1 << 20  # bytes of a data message
_MAX_JOINED_LEAVES = 1024  # leaves joined in one
_ALIGNMENT = 64

Bytes = NDArray[np.uint8]


class Submission:
    """One RPC.

    Args:
        start: begins it with these requests.
        heard: takes a reply. ended: is called once, after the last, with the error or None.
    """

    def __init__(
        self,
        start: Callable[[Iterator[worker_pb2.SubmitRequest]], Any],
        header: worker_pb2.SubmitHeader,
        parts: Sequence[Bytes],
        heard: Callable[[worker_pb2.SubmitReply], None],
        ended: Callable[[Exception | None], None],
    ) -> None:
        self._start = start
        self._requests = requests(header, parts)
        self._on_reply = heard
        self._on_end = ended

    def begin(self) -> None:
        try:
            threading.Thread(target=self._run, name="collectived-submit", daemon=True).start()
        except RuntimeError as error:  # the interpreter is ending, and starts no more threads
            self._on_end(error)

    def _run(self) -> None:
        """Run the RPC. `ended` is called at its end, also after an error in this thread."""
        last: Exception | None = None
        try:
            self._exchange()
        except Exception as error:
            last = error
            error.__traceback__ = None  # it is the RPC itself, and is to end in this thread: no cycle, no cause
        try:
            self._on_end(last)
        except Exception as error:  # this process has no memory left, say: that is the end of the call, then
            self._on_end(error)

    def _exchange(self) -> None:
        with fork_lock:
            call = self._start(self._requests)
        try:
            for reply in call:
                self._on_reply(reply)
        finally:
            call.cancel()  # which changes nothing where it is over


def requests(header: worker_pb2.SubmitHeader, parts: Sequence[Bytes]) -> Iterator[worker_pb2.SubmitRequest]:
    """The header, then the bytes of all leaves, one after another, in chunks."""
    yield worker_pb2.SubmitRequest(header=header)
    waiting: list[memoryview] = []
    size = 0
    for part in parts:
        data = part.data
        while data:
            piece = data[: CHUNK_BYTES - size]
            waiting.append(piece)
            size += len(piece)
            data = data[len(piece) :]
            if size == CHUNK_BYTES or len(waiting) == _MAX_JOINED_LEAVES:
                yield worker_pb2.SubmitRequest(data=b"".join(waiting))
                waiting, size = [], 0
    if waiting:
        yield worker_pb2.SubmitRequest(data=b"".join(waiting))


class IncomingResult(ABC):
    """The result of one call.

    Attributes:
        block: where it lies, from its first complete pack on.
        has_begun: whether anything has come, if only that nothing will.
    """

    def __init__(self, prepared: PreparedCall, described: common_pb2.Collective) -> None:
        self.block: Block | None = None
        self.has_begun = False
        self._prepared = prepared
        self._collective = described
        self._current_result: worker_pb2.SubmitResult | None = None  # whose leaves are coming
        self._pending_leaves: deque[Bytes] = deque()  # those that have not come in full
        self._filled = 0  # bytes of the first of them

    def receive(self, reply: worker_pb2.SubmitReply) -> list[int]:
        """Takes in a reply; the packs that are complete by it.

        Raises:
            ValueError: it is not what belongs here.
        """
        self.has_begun = True
        if not self._prepared.receives or not self._prepared.pack_count:
            return []  # it only says that all is over
        if reply.HasField("result"):
            if self._current_result is not None:
                raise ValueError("a result before the one that was announced had come")
            self._current_result = reply.result
            self._pending_leaves.extend(
                self._leaf_buffer(index, leaf)
                for index, leaf in zip(reply.result.indices, reply.result.leaves, strict=True)
            )
        else:
            self._fill(np.frombuffer(reply.data, np.uint8))
        while self._pending_leaves and self._filled == len(self._pending_leaves[0]):
            self._pending_leaves.popleft()
            self._filled = 0
        if self._pending_leaves or self._current_result is None:
            return []
        result, self._current_result = self._current_result, None
        return self._on_result(result)

    def _fill(self, data: Bytes) -> None:
        while len(data):
            if not self._pending_leaves:
                raise ValueError(f"{len(data)} bytes that were not announced")
            memory = self._pending_leaves[0]
            part = data[: len(memory) - self._filled]
            memory[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == len(memory):
                self._pending_leaves.popleft()
                self._filled = 0

    def _pack_of(self, result: worker_pb2.SubmitResult) -> int:
        if not result.indices:
            raise ValueError("a result without leaves")
        return self._prepared.layout.places[result.indices[0]].pack

    @abstractmethod
    def _leaf_buffer(self, index: int, leaf: common_pb2.Leaf) -> Bytes:
        """Where the bytes of a leaf belong."""

    @abstractmethod
    def _on_result(self, result: worker_pb2.SubmitResult) -> list[int]:
        """The packs that are complete, now that all of `result` has come."""


class FixedLayoutResult(IncomingResult):
    """A result laid out as Prepare said."""

    def _leaf_buffer(self, index: int, leaf: common_pb2.Leaf) -> Bytes:
        layout = self._prepared.layout
        if index >= len(layout.places):
            raise ValueError(f"leaf {index} of {len(layout.places)}")
        if self.block is None:
            self.block = Block(layout.result_bytes)
        place = layout.places[index]
        pack = layout.packs[place.pack]
        start = pack.result_offset + place.offset * pack.result_dtype.itemsize
        stop = start + math.prod(self._collective.leaves[index].shape) * pack.result_dtype.itemsize
        if _nbytes(leaf) != stop - start:
            raise ValueError(f"{_nbytes(leaf)} bytes of leaf {index}, which has {stop - start}")
        return self.block.memory[start:stop]

    def _on_result(self, result: worker_pb2.SubmitResult) -> list[int]:
        return [self._pack_of(result)]


class VariableLayoutResult(IncomingResult):
    """A result whose layout was not known: behind an outline, which is written when all of it has come."""

    def __init__(self, prepared: PreparedCall, described: common_pb2.Collective) -> None:
        super().__init__(prepared, described)
        self._leaves: dict[int, tuple[common_pb2.Leaf, Bytes]] = {}
        self._packs: list[int] = []

    def _leaf_buffer(self, index: int, leaf: common_pb2.Leaf) -> Bytes:
        memory = np.empty(_nbytes(leaf), np.uint8)
        self._leaves[index] = leaf, memory
        return memory

    def _on_result(self, result: worker_pb2.SubmitResult) -> list[int]:
        self._packs.append(0 if self._prepared.accepts_any else self._pack_of(result))
        if len(self._leaves) < result.total:
            return []
        self._write(result)
        return self._packs

    def _write(self, result: worker_pb2.SubmitResult) -> None:
        leaves = [self._leaves[index] for index in range(result.total)]
        description = b""
        if self._prepared.accepts_any:
            told = common_pb2.Collective(structure=result.structure, leaves=[leaf for leaf, _ in leaves])
            operation = self._collective.WhichOneof("operation")
            if operation is not None:
                getattr(told, operation).CopyFrom(getattr(self._collective, operation))
            description = told.SerializeToString()
        pieces: list[Pieces] = [((0, leaf.shape[0] if leaf.shape else 1),) for leaf, _ in leaves]
        at = _aligned(ResultHeader(0, tuple(pieces), description).nbytes)
        for index, (_, memory) in enumerate(leaves):
            pieces[index] = ((at, pieces[index][0][1]),)
            at += _aligned(len(memory))
        self.block = Block(at)
        head = ResultHeader(at, tuple(pieces), description).encode()
        self.block.memory[: len(head)] = np.frombuffer(head, np.uint8)
        for ((start, _),), (_, memory) in zip(pieces, leaves, strict=True):
            self.block.memory[start : start + len(memory)] = memory


def _nbytes(leaf: common_pb2.Leaf) -> int:
    return math.prod(leaf.shape) * DType(leaf.dtype).itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
