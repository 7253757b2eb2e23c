"""Blocks: how the values of a pack lie where they travel compressed between workers.

A *block* is 128 neighbouring values of one array, fewer at its end. It is compressed by itself, as `compression.h` of
the native core says, so that a plan which counts blocks instead of elements may cut them as it likes: a block is one
row, of a fixed number of bytes. In a reduce_scatter the values that go to one worker are what is cut into blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from collectived_native import core
from collectived_proto.types import Collective, Compression, DType, Layout, Reduction
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.plan.moves import Span

BLOCK_VALUES = core.BLOCK_VALUES
MIN_COMPRESSED_BYTES = 4096  # of partial sums: what is smaller is not worth an error, nor the time
_PARTIAL_BYTES = DType.FLOAT32.itemsize


@dataclass(frozen=True, slots=True)
class ValueRun:
    """Values [start, stop) of the vector, which begin a block: value `target`, counted in blocks."""

    start: int
    stop: int
    target: int

    @property
    def end(self) -> int:
        """Where its last block ends, counted as `target`."""
        return self.target + _round_up(self.stop - self.start)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the values of a vector, or of a part of it, lie in blocks. `runs` ascend in both.

    Attributes:
        blocks: those that it is about.
    """

    compression: Compression
    blocks: Span
    runs: tuple[ValueRun, ...]

    @property
    def format(self) -> int:
        """The number of its format in the native core."""
        return self.compression.number

    @property
    def block_bytes(self) -> int:
        return core.block_bytes(self.format)

    @property
    def wire_bytes(self) -> int:
        """Of all of it, compressed."""
        return len(self.blocks) * self.block_bytes

    @property
    def values(self) -> Span:
        """The values that it holds, of the vector."""
        return Span(self.runs[0].start, self.runs[-1].stop) if self.runs else Span(0, 0)

    @property
    def is_plain(self) -> bool:
        """Whether blocks follow each other in the vector as it is."""
        return all(run.start == run.target and (run.stop - run.start) % BLOCK_VALUES == 0 for run in self.runs)

    def select(self, blocks: Span) -> BlockLayout:
        """The part that is about these blocks."""
        first, last = blocks.start * BLOCK_VALUES, blocks.stop * BLOCK_VALUES
        runs = []
        for run in self.runs:
            ahead = run.start - run.target
            start, stop = max(run.start, first + ahead), min(run.stop, last + ahead)
            if start < stop:
                runs.append(ValueRun(start, stop, start - ahead))
        return BlockLayout(self.compression, blocks, tuple(runs))

    def to_blocks(self, values: Span) -> Span:
        """The blocks of values that begin a block and end one."""
        if not len(values):
            return Span(0, 0)
        run = self.runs[bisect_right(self.runs, values.start, key=lambda run: run.start) - 1]
        first = run.target + values.start - run.start
        return Span(first // BLOCK_VALUES, _round_up(first + len(values)) // BLOCK_VALUES)


def lay_out(compression: Compression, spans: Iterable[Span]) -> BlockLayout:
    """Each of these neighbouring spans of a vector in blocks of its own."""
    runs: list[ValueRun] = []
    target = 0
    for span in spans:
        if not len(span):
            continue
        if runs and runs[-1].target + runs[-1].stop - runs[-1].start == target and runs[-1].stop == span.start:
            runs[-1] = ValueRun(runs[-1].start, span.stop, runs[-1].target)
        else:
            runs.append(ValueRun(span.start, span.stop, target))
        target = runs[-1].end
    return BlockLayout(compression, Span(0, target // BLOCK_VALUES), tuple(runs))


def lay_out_packs(collective: Collective, topology: GroupTopology, layout: Layout) -> tuple[BlockLayout | None, ...]:
    """The leaves of each pack in blocks; None where it does not travel compressed."""
    if not _may_compress(collective, topology):
        return (None,) * len(layout.packs)
    spans: list[list[Span]] = [[] for _ in layout.packs]
    for place, leaf in zip(layout.places, collective.leaves, strict=True):
        spans[place.pack].append(Span(place.offset, place.offset + leaf.count))
    return tuple(_select_smaller(collective.compression, sorted(one)) for one in spans)


def lay_out_shares(collective: Collective, topology: GroupTopology, shares: Sequence[Span]) -> BlockLayout | None:
    """Lay out each worker's share of a leaf in blocks; None where it does not travel compressed."""
    return _select_smaller(collective.compression, shares) if _may_compress(collective, topology) else None


def _select_smaller(compression: Compression, spans: Sequence[Span]) -> BlockLayout | None:
    """These spans in blocks; None where they have fewer bytes as they are, or few."""
    nbytes = sum(map(len, spans)) * _PARTIAL_BYTES
    if nbytes < MIN_COMPRESSED_BYTES:
        return None
    found = lay_out(compression, spans)
    return found if found.wire_bytes < nbytes else None


def _may_compress(collective: Collective, topology: GroupTopology) -> bool:
    is_asked = collective.compression is not Compression.NONE and isinstance(collective.operation, Reduction)
    return is_asked and len(topology.peers) > 1


def _round_up(values: int) -> int:
    return -(-values // BLOCK_VALUES) * BLOCK_VALUES
