"""Cutting: where the rows of one leaf go when an operation cuts values apart or joins them.

*Wide* positions count the elements of all ranks' rows, place by place (worker by worker) and within a place rank by
rank, so that what a worker sends or receives is one span; plans speak of those. A worker holds only the part that
concerns it: a *window* maps wide positions to its memory. What goes from a rank to another one of the same worker is
*local* and not in any plan's way: it is copied straight into the result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from collectived_proto.local.outline import Pieces, joined
from collectived_proto.types import AllGather, AllToAll, Cutting, Gather, ReduceScatter, Scatter
from collectived_runtime.plan import exchange, ring
from collectived_runtime.plan.collect import WidePlan
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.spans import hull

Rows = Sequence[Sequence[int]]
"""By rank; for gathers the first length of each leaf, for an uneven all-to-all what goes to each rank."""


@dataclass(frozen=True, slots=True)
class Window:
    """Wide positions from `starts[i]` on lie from `offsets[i]` on, up to the next start."""

    starts: tuple[int, ...] = (0,)
    offsets: tuple[int, ...] = (0,)

    def at(self, wide: int) -> int:
        index = max(0, bisect_right(self.starts, wide) - 1)
        return wide - self.starts[index] + self.offsets[index]


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) of the leaf of `rank`, which belong at `to`."""

    rank: int
    start: int
    stop: int
    to: int


@dataclass(frozen=True, slots=True)
class Cut:
    """How one leaf travels, as one worker sees it. Elements, but for the rows in `pieces`.

    Attributes:
        count: elements in wide positions.
        local: what is copied into the output here, `to` positions in it.
        sent: what others get, or what is folded, `to` wide positions.
        sending, receiving: windows of what is sent and of the output.
        output: elements of the output.
        pieces: for every local receiver the (offset in the output, rows) of its result.
    """

    count: int
    plan: WidePlan
    local: tuple[Part, ...]
    sent: tuple[Part, ...]
    sending: Window
    receiving: Window
    output: int
    pieces: Mapping[int, Pieces]

    @property
    def straight(self) -> bool:
        """Whether the leaves that are folded stand in wide order as they are."""
        return all(part.start == part.to for part in self.sent)


@dataclass(frozen=True, slots=True)
class Workers:
    """Ranks by place, and mine."""

    ranks: tuple[tuple[int, ...], ...]
    place: int

    @property
    def order(self) -> list[int]:
        """All ranks, place by place."""
        return [rank for local in self.ranks for rank in local]

    @property
    def mine(self) -> tuple[int, ...]:
        return self.ranks[self.place]

    def place_of(self, rank: int) -> int:
        return next(place for place, local in enumerate(self.ranks) if rank in local)


def cut(operation: Cutting, workers: Workers, leaf: int, length: int, width: int, rows: Rows) -> Cut:
    """How leaf number `leaf` travels.

    Args:
        length: rows of the leaf where all ranks' have as many, or of the root's.
        width: elements of one row.
        rows: of all ranks, where lengths differ.
    """
    match operation:
        case AllGather():
            return _gathered(workers, [row[leaf] for row in rows], width, None)
        case Gather(root):
            return _gathered(workers, [row[leaf] for row in rows], width, root)
        case Scatter(root, _, sizes):
            return _scattered(workers, sizes or even(length, len(workers.order)), width, root)
        case ReduceScatter(_, _, sizes):
            return _reduced(workers, sizes or even(length, len(workers.order)), width)
        case AllToAll(_, sizes):
            size = len(workers.order)
            return _exchanged(workers, rows if sizes else [even(length, size)] * size, width)


def even(length: int, size: int) -> tuple[int, ...]:
    """Rows by rank; what remains goes to the first ranks."""
    return tuple(length // size + (rank < length % size) for rank in range(size))


def _gathered(workers: Workers, rows: Sequence[int], width: int, root: int | None) -> Cut:
    starts = _starts(workers.order, rows, width)
    shares = _shares(workers, rows, width)
    places = range(len(shares))
    own = shares[workers.place]
    if root is None:
        plan = ring.all_gather(places, workers.place, shares)
    else:
        plan = exchange.gather(places, workers.place, shares, workers.place_of(root))
    mine = tuple(Part(rank, 0, rows[rank] * width, starts[rank]) for rank in workers.mine)
    count = shares[-1].stop
    if root is not None and root not in workers.mine:
        return Cut(count, plan, (), mine, Window((own.start,)), Window(), 0, {})
    pieces = joined([(starts[rank], rows[rank]) for rank in range(len(rows))], width)
    receivers = workers.mine if root is None else (root,)
    return Cut(count, plan, mine, (), Window(), Window(), count, dict.fromkeys(receivers, pieces))


def _scattered(workers: Workers, sizes: Sequence[int], width: int, root: int) -> Cut:
    starts = _starts(workers.order, sizes, width)
    leaf = _starts(range(len(sizes)), sizes, width)
    shares = _shares(workers, sizes, width)
    own = shares[workers.place]
    plan = exchange.scatter(range(len(shares)), workers.place, shares, workers.place_of(root))
    local: tuple[Part, ...] = ()
    sent: tuple[Part, ...] = ()
    if root in workers.mine:
        local = tuple(_part(root, leaf, sizes, width, to, starts[to] - own.start) for to in workers.mine)
        others = [rank for rank in workers.order if rank not in workers.mine]
        sent = tuple(_part(root, leaf, sizes, width, to, starts[to]) for to in others)
    pieces = {rank: joined([(starts[rank] - own.start, sizes[rank])], width) for rank in workers.mine}
    return Cut(shares[-1].stop, plan, local, sent, Window(), Window((own.start,)), len(own), pieces)


def _reduced(workers: Workers, sizes: Sequence[int], width: int) -> Cut:
    starts = _starts(workers.order, sizes, width)
    leaf = _starts(range(len(sizes)), sizes, width)
    shares = _shares(workers, sizes, width)
    own = shares[workers.place]
    plan = ring.reduce_scatter(range(len(shares)), workers.place, shares)
    folded = tuple(_part(rank, leaf, sizes, width, to, starts[to]) for rank in workers.mine for to in workers.order)
    pieces = {rank: joined([(starts[rank] - own.start, sizes[rank])], width) for rank in workers.mine}
    return Cut(shares[-1].stop, plan, (), folded, Window(), Window((own.start,)), len(own), pieces)


def _exchanged(workers: Workers, rows: Rows, width: int) -> Cut:
    """In a block between two places, rows stand by receiver and then by sender."""
    places = range(len(workers.ranks))
    table: list[list[Span]] = []
    at = 0
    for senders in workers.ranks:
        row = []
        for receivers in workers.ranks:
            length = sum(rows[sender][to] for to in receivers for sender in senders) * width
            row.append(Span(at, at + length))
            at += length
        table.append(row)
    plan = exchange.all_to_all(places, workers.place, table)
    column = [row[workers.place] for row in table]
    offsets = (0, *accumulate(map(len, column)))
    receiving = Window(tuple(span.start for span in column), offsets[:-1])
    leaves = {sender: _starts(range(len(rows)), rows[sender], width) for sender in workers.mine}

    def positions(senders: Sequence[int], receivers: Sequence[int], start: int) -> dict[tuple[int, int], int]:
        pairs = [(sender, to) for to in receivers for sender in senders]
        lengths = [rows[sender][to] * width for sender, to in pairs]
        return dict(zip(pairs, accumulate(lengths, initial=start), strict=False))

    arrivals: dict[tuple[int, int], int] = {}
    for senders, offset in zip(workers.ranks, offsets, strict=False):
        arrivals |= positions(senders, workers.mine, offset)
    local: list[Part] = []
    sent: list[Part] = []
    for place in places:
        to_place = workers.ranks[place]
        wide = positions(workers.mine, to_place, table[workers.place][place].start)
        for sender in workers.mine:
            for to in to_place:
                target = arrivals[sender, to] if place == workers.place else wide[sender, to]
                part = _part(sender, leaves[sender], rows[sender], width, to, target)
                (local if place == workers.place else sent).append(part)
    pieces = {
        to: joined([(arrivals[sender, to], rows[sender][to]) for sender in range(len(rows))], width)
        for to in workers.mine
    }
    sending = Window((hull(table[workers.place]).start,))
    return Cut(at, plan, tuple(local), tuple(sent), sending, receiving, offsets[-1], pieces)


def _part(rank: int, leaf: Mapping[int, int], sizes: Sequence[int], width: int, piece: int, to: int) -> Part:
    start = leaf[piece]
    return Part(rank, start, start + sizes[piece] * width, to)


def _starts(order: Sequence[int], rows: Sequence[int], width: int) -> dict[int, int]:
    """Where the rows of each rank begin if they stand in that order, in elements."""
    return dict(zip(order, accumulate((rows[rank] * width for rank in order), initial=0), strict=False))


def _shares(workers: Workers, rows: Sequence[int], width: int) -> list[Span]:
    lengths = [sum(rows[rank] for rank in local) * width for local in workers.ranks]
    stops = list(accumulate(lengths))
    return [Span(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]


def one_run(parts: Sequence[Part]) -> tuple[int, int] | None:
    """(rank, wide position of its leaf's begin) where all parts stand in one leaf as they belong: it can be sent."""
    runs = {(part.rank, part.to - part.start) for part in parts if part.stop > part.start}
    return next(iter(runs)) if len(runs) == 1 else None
