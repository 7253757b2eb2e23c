"""Results as they come over gRPC, put where a worker of this host would have put them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from collectived.calls.prepare import Prepared
from collectived.grpc_alone.heap import Block
from collectived_proto.local.outline import Outline, Pieces
from collectived_proto.types import DType
from collectived_proto.v1 import common_pb2, worker_pb2

_ALIGNMENT = 64

Bytes = NDArray[np.uint8]
Take = Callable[[int], Block]  # makes a block of at least so many bytes


class Incoming(ABC):
    """The result of one call.

    Attributes:
        block: where it lies, from its first complete pack on.
        begun: whether anything has come, if only that nothing will.
    """

    def __init__(self, prepared: Prepared, described: common_pb2.Collective, take: Take) -> None:
        self.block: Block | None = None
        self.begun = False
        self._prepared = prepared
        self._described = described
        self._take = take
        self._announced: worker_pb2.SubmitResult | None = None  # whose leaves are coming
        self._coming: deque[Bytes] = deque()  # those that have not come in full
        self._filled = 0  # bytes of the first of them

    def take(self, reply: worker_pb2.SubmitReply) -> list[int]:
        """Takes in a reply; the packs that are complete by it.

        Raises:
            ValueError: it is not what belongs here.
        """
        self.begun = True
        if not self._prepared.receives or not self._prepared.packs:
            return []  # it only says that all is over
        if reply.HasField("result"):
            if self._announced is not None:
                raise ValueError("a result before the one that was announced had come")
            self._announced = reply.result
            self._coming.extend(
                self._room(index, leaf) for index, leaf in zip(reply.result.indices, reply.result.leaves, strict=True)
            )
        else:
            self._fill(np.frombuffer(reply.data, np.uint8))
        while self._coming and self._filled == len(self._coming[0]):
            self._coming.popleft()
            self._filled = 0
        if self._coming or self._announced is None:
            return []
        result, self._announced = self._announced, None
        return self._came(result)

    def _fill(self, data: Bytes) -> None:
        while len(data):
            if not self._coming:
                raise ValueError(f"{len(data)} bytes that were not announced")
            memory = self._coming[0]
            part = data[: len(memory) - self._filled]
            memory[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == len(memory):
                self._coming.popleft()
                self._filled = 0

    def _pack_of(self, result: worker_pb2.SubmitResult) -> int:
        if not result.indices:
            raise ValueError("a result without leaves")
        return self._prepared.layout.places[result.indices[0]].pack

    @abstractmethod
    def _room(self, index: int, leaf: common_pb2.Leaf) -> Bytes:
        """Where the bytes of a leaf belong."""

    @abstractmethod
    def _came(self, result: worker_pb2.SubmitResult) -> list[int]:
        """The packs that are complete, now that all of `result` has come."""


class LaidOut(Incoming):
    """A result laid out as Prepare said."""

    def _room(self, index: int, leaf: common_pb2.Leaf) -> Bytes:
        layout = self._prepared.layout
        if index >= len(layout.places):
            raise ValueError(f"leaf {index} of {len(layout.places)}")
        if self.block is None:
            self.block = self._take(layout.result_bytes)
        place = layout.places[index]
        pack = layout.packs[place.pack]
        start = pack.result_offset + place.offset * pack.result_dtype.itemsize
        stop = start + math.prod(self._described.leaves[index].shape) * pack.result_dtype.itemsize
        if _nbytes(leaf) != stop - start:
            raise ValueError(f"{_nbytes(leaf)} bytes of leaf {index}, which has {stop - start}")
        return self.block.memory[start:stop]

    def _came(self, result: worker_pb2.SubmitResult) -> list[int]:
        return [self._pack_of(result)]


class Outlined(Incoming):
    """A result whose layout was not known: behind an outline, which is written when all of it has come."""

    def __init__(self, prepared: Prepared, described: common_pb2.Collective, take: Take) -> None:
        super().__init__(prepared, described, take)
        self._leaves: dict[int, tuple[common_pb2.Leaf, Bytes]] = {}
        self._packs: list[int] = []

    def _room(self, index: int, leaf: common_pb2.Leaf) -> Bytes:
        memory = np.empty(_nbytes(leaf), np.uint8)
        self._leaves[index] = leaf, memory
        return memory

    def _came(self, result: worker_pb2.SubmitResult) -> list[int]:
        self._packs.append(0 if self._prepared.open else self._pack_of(result))
        if len(self._leaves) < result.total:
            return []
        self._write(result)
        return self._packs

    def _write(self, result: worker_pb2.SubmitResult) -> None:
        leaves = [self._leaves[index] for index in range(result.total)]
        description = b""
        if self._prepared.open:
            told = common_pb2.Collective(structure=result.structure, leaves=[leaf for leaf, _ in leaves])
            operation = self._described.WhichOneof("operation")
            if operation is not None:
                getattr(told, operation).CopyFrom(getattr(self._described, operation))
            description = told.SerializeToString()
        pieces: list[Pieces] = [((0, leaf.shape[0] if leaf.shape else 1),) for leaf, _ in leaves]
        at = _aligned(Outline(0, tuple(pieces), description).nbytes)
        for index, (_, memory) in enumerate(leaves):
            pieces[index] = ((at, pieces[index][0][1]),)
            at += _aligned(len(memory))
        self.block = self._take(at)
        head = Outline(at, tuple(pieces), description).encode()
        self.block.memory[: len(head)] = np.frombuffer(head, np.uint8)
        for ((start, _),), (_, memory) in zip(pieces, leaves, strict=True):
            self.block.memory[start : start + len(memory)] = memory


def _nbytes(leaf: common_pb2.Leaf) -> int:
    return math.prod(leaf.shape) * DType(leaf.dtype).itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
