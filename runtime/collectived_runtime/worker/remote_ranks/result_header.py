"""Results whose form was not known when their collective was described: their outline has it."""

from __future__ import annotations

import math
import struct

from collectived_proto.codec import collective_from_proto
from collectived_proto.ipc import result_header
from collectived_proto.ipc.result_header import ResultHeader
from collectived_proto.types import AxisOperation, Collective, DType, Leaf
from collectived_proto.v1 import common_pb2, worker_pb2
from collectived_runtime.worker.prepared import ResultChunk, Span, Submittable, run_or_offload

_HEADER = struct.Struct("<3Q")  # of an outline; the last is the number of its leaves


class RemoteResult:
    """The result of one rank behind an outline. Offsets are from its start."""

    def __init__(self, memory: memoryview, described: Submittable) -> None:
        self._header: ResultHeader = result_header.parse_header(memory)
        self._layout = described.layout
        self._is_open = described.collective.open
        self._collective: Collective = (
            collective_from_proto(common_pb2.Collective.FromString(self._header.description))
            if self._is_open
            else described.collective
        )
        self._leaves_by_pack: dict[int, list[int]] = {}
        for index, place in enumerate(described.layout.places):
            self._leaves_by_pack.setdefault(place.pack, []).append(index)

    @classmethod
    async def parse(cls, memory: memoryview, described: Submittable) -> RemoteResult:
        """Parse the result that begins there."""
        return await run_or_offload(_HEADER.unpack_from(memory)[2], lambda: cls(memory, described))

    async def make_chunk(self, pack: int | None) -> ResultChunk:
        """Return the description of a pack, or of the whole result."""
        members = range(len(self._collective.leaves)) if pack is None else self._leaves_by_pack[pack]
        return await run_or_offload(len(members), lambda: self._make_chunk(members))

    def _make_chunk(self, members: range | list[int]) -> ResultChunk:
        leaves = self._collective.leaves
        structure = self._collective.structure if self._is_open else ""
        header = worker_pb2.SubmitResult(indices=members, structure=structure, total=len(leaves))
        spans: list[Span] = []
        for index in members:
            leaf, pieces = leaves[index], self._header.leaves[index]
            dtype = self._result_dtype(index, leaf)
            shape = leaf.shape
            if isinstance(self._collective.operation, AxisOperation):
                shape = (sum(rows for _, rows in pieces), *shape[1:])
            header.leaves.add(path=leaf.path, dtype=dtype.name, shape=shape)
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            spans.extend((offset, offset + rows * row_bytes) for offset, rows in pieces if rows * row_bytes)
        return ResultChunk(header, tuple(spans))

    def _result_dtype(self, index: int, leaf: Leaf) -> DType:
        return leaf.dtype if self._is_open else self._layout.packs[self._layout.places[index].pack].result_dtype
