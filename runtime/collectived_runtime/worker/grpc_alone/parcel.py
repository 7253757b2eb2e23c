"""Results whose form was not known when their collective was described: their outline tells it."""

from __future__ import annotations

import math
import struct

from collectived_proto.codec import collective_from_proto
from collectived_proto.local import outline
from collectived_proto.local.outline import Outline
from collectived_proto.types import Collective, Cutting, DType, Leaf
from collectived_proto.v1 import common_pb2, worker_pb2
from collectived_runtime.worker.descriptions import Description, Shipment, Span, think

_HEAD = struct.Struct("<3Q")  # of an outline; the last is the number of its leaves


class Parcel:
    """The result of one rank behind an outline. Offsets are from its start."""

    def __init__(self, memory: memoryview, described: Description) -> None:
        self._outline: Outline = outline.parse(memory)
        self._packs = described.layout
        self._open = described.collective.open
        self._collective: Collective = (
            collective_from_proto(common_pb2.Collective.FromString(self._outline.description))
            if self._open
            else described.collective
        )
        self._members: dict[int, list[int]] = {}
        for index, place in enumerate(described.layout.places):
            self._members.setdefault(place.pack, []).append(index)

    @classmethod
    async def read(cls, memory: memoryview, described: Description) -> Parcel:
        """The parcel that begins there."""
        return await think(_HEAD.unpack_from(memory)[2], lambda: cls(memory, described))

    async def shipment(self, pack: int | None) -> Shipment:
        """What is told of a pack, or of everything."""
        members = range(len(self._collective.leaves)) if pack is None else self._members[pack]
        return await think(len(members), lambda: self._shipment(members))

    def _shipment(self, members: range | list[int]) -> Shipment:
        leaves = self._collective.leaves
        structure = self._collective.structure if self._open else ""
        header = worker_pb2.SubmitResult(indices=members, structure=structure, total=len(leaves))
        spans: list[Span] = []
        for index in members:
            leaf, pieces = leaves[index], self._outline.leaves[index]
            dtype = self._dtype(index, leaf)
            shape = leaf.shape
            if isinstance(self._collective.operation, Cutting):
                shape = (sum(rows for _, rows in pieces), *shape[1:])
            header.leaves.add(path=leaf.path, dtype=dtype.name, shape=shape)
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            spans.extend((offset, offset + rows * row_bytes) for offset, rows in pieces if rows * row_bytes)
        return Shipment(header, tuple(spans))

    def _dtype(self, index: int, leaf: Leaf) -> DType:
        return leaf.dtype if self._open else self._packs.packs[self._packs.places[index].pack].result_dtype
