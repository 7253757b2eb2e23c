"""Cutting: where the rows of one leaf go when an operation cuts values apart or joins them.

*Wide* positions count the elements of all ranks' rows, place by place (worker by worker) and within a place rank by
rank, so that what a worker sends or receives is one span; plans speak of those. A worker holds only the part that
concerns it: a *window* maps wide positions to its memory. Data from a rank to another one of the same worker are
*local* and in no plan: they are copied straight into the result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from collectived_proto.ipc.result_header import OWN_ROWS, Pieces, merge_adjacent
from collectived_proto.rows import split_evenly
from collectived_proto.types import AllGather, AllToAll, AxisOperation, Gather, ReduceScatter, Scatter
from collectived_runtime.plan import all_to_all, ring
from collectived_runtime.plan.moves import Buffer, FinishMove, SendMove, Span
from collectived_runtime.plan.spans import hull
from collectived_runtime.plan.wide_moves import WideMove, WidePlan

Rows = Sequence[Sequence[int]]
"""By rank; for gathers the first length of each leaf, for an uneven all-to-all what goes to each rank."""


@dataclass(frozen=True, slots=True)
class Window:
    """Wide positions from `starts[i]` on lie from `offsets[i]` on, up to the next start."""

    starts: tuple[int, ...] = (0,)
    offsets: tuple[int, ...] = (0,)

    def translate(self, wide: int) -> int:
        index = max(0, bisect_right(self.starts, wide) - 1)
        return wide - self.starts[index] + self.offsets[index]


@dataclass(frozen=True, slots=True)
class RowRange:
    """Elements [start, stop) of the leaf of `rank`, which belong at `target`."""

    rank: int
    start: int
    stop: int
    target: int


@dataclass(frozen=True, slots=True)
class Partition:
    """How one leaf travels, as one worker sees it. Elements, but for the rows in `pieces`.

    Attributes:
        count: elements in wide positions.
        local_copies: what is copied into the output here, `target` positions in it.
        outgoing: what others get, or what is folded, `target` wide positions.
        send_window, receive_window: windows of what is sent and of the output.
        output_count: elements of the output.
        pieces: for every local receiver the (offset in the output, rows) of its result; of rows that are left to it
            (OWN_ROWS + the first of them in its value, rows).
        width: elements of a row.
        shares: of a reduce_scatter, what each place gets, and of an all_gather, what it gives, in wide positions.
    """

    count: int
    plan: WidePlan
    local_copies: tuple[RowRange, ...]
    outgoing: tuple[RowRange, ...]
    send_window: Window
    receive_window: Window
    output_count: int
    pieces: Mapping[int, Pieces]
    width: int
    shares: tuple[Span, ...] = ()

    def trace_result(self, rank: int, parts: Sequence[RowRange]) -> list[RowRange]:
        """Which elements of `parts` the result of a local receiver has; `target` counts in that result alone."""
        ordered = sorted((part for part in parts if part.stop > part.start), key=lambda part: part.target)
        starts = [part.target for part in ordered]
        found: list[RowRange] = []
        ahead = 0
        for start, rows in self.pieces[rank]:
            stop = start + rows * self.width
            for part in ordered[max(0, bisect_right(starts, start) - 1) :]:
                if part.target >= stop:
                    break
                first, last = max(start, part.target), min(stop, part.target + part.stop - part.start)
                if first < last:
                    offset = part.start - part.target
                    found.append(RowRange(part.rank, first + offset, last + offset, ahead + first - start))
            ahead += stop - start
        return found

    def leave_own(self, rank: int) -> Partition:
        """The same, where the only local rank takes its own rows of the result from its own arrays."""
        copies = [copy for copy in self.local_copies if copy.stop > copy.start]
        if rank not in self.pieces or len(copies) != 1 or not self.width:
            return self
        own = copies[0]
        kept = Span(own.target, own.target + own.stop - own.start)
        pieces: list[tuple[int, int]] = []
        for at, rows in self.pieces[rank]:
            first, last = max(at, kept.start), min(at + rows * self.width, kept.stop)
            if first >= last:
                pieces.append((at, rows))
                continue
            row = (own.start + first - kept.start) // self.width
            parts = (at, first - at), (OWN_ROWS + row, last - first), (last, at + rows * self.width - last)
            pieces += [(offset, count // self.width) for offset, count in parts if count]
        plan, outgoing = self.plan, self.outgoing
        if not outgoing:  # of a gather: its own rows, if any others need them, are sent from the output
            plan, outgoing = tuple(tuple(_read_input(kept, moves)) for moves in plan), (own,)
        return replace(self, plan=plan, local_copies=(), outgoing=outgoing, pieces={**self.pieces, rank: tuple(pieces)})

    @property
    def is_in_order(self) -> bool:
        """Whether the leaves that are folded stand in wide order as they are."""
        return all(part.start == part.target for part in self.outgoing)

    def list_runs(self, ranks: Sequence[int]) -> list[tuple[int, int]]:
        """The results of some local ranks, one behind the other, as parts [start, stop) of the output."""
        found: list[tuple[int, int]] = []
        for rank in ranks:
            for start, rows in self.pieces[rank]:
                stop = start + rows * self.width
                if found and found[-1][1] == start:
                    found[-1] = found[-1][0], stop
                else:
                    found.append((start, stop))
        return found


@dataclass(frozen=True, slots=True)
class RanksByWorker:
    """Ranks by place, and those of this worker."""

    ranks_by_place: tuple[tuple[int, ...], ...]
    place: int

    @property
    def all_ranks(self) -> list[int]:
        """All ranks, place by place."""
        return [rank for local in self.ranks_by_place for rank in local]

    @property
    def own_ranks(self) -> tuple[int, ...]:
        return self.ranks_by_place[self.place]

    def place_of(self, rank: int) -> int:
        return next(place for place, local in enumerate(self.ranks_by_place) if rank in local)


def partition_leaf(
    operation: AxisOperation, workers: RanksByWorker, leaf: int, length: int, width: int, rows: Rows
) -> Partition:
    """How leaf number `leaf` travels.

    Args:
        length: rows of the leaf where all ranks' have as many, or of the root's.
        width: elements of one row.
        rows: of all ranks, where lengths differ.
    """
    match operation:
        case AllGather():
            return _partition_gather(workers, [row[leaf] for row in rows], width, None)
        case Gather(root):
            return _partition_gather(workers, [row[leaf] for row in rows], width, root)
        case Scatter(root, _, sizes):
            return _partition_scatter(workers, sizes or split_evenly(length, len(workers.all_ranks)), width, root)
        case ReduceScatter(_, _, sizes):
            return _partition_reduce_scatter(workers, sizes or split_evenly(length, len(workers.all_ranks)), width)
        case AllToAll(_, sizes):
            size = len(workers.all_ranks)
            return _partition_all_to_all(workers, rows if sizes else [split_evenly(length, size)] * size, width)


def _partition_gather(workers: RanksByWorker, rows: Sequence[int], width: int, root: int | None) -> Partition:
    starts = _compute_starts(workers.all_ranks, rows, width)
    shares = _compute_place_spans(workers, rows, width)
    places = range(len(shares))
    own = shares[workers.place]
    if root is None:
        plan = ring.all_gather(places, workers.place, shares)
    else:
        plan = all_to_all.gather(places, workers.place, shares, workers.place_of(root))
    mine = tuple(RowRange(rank, 0, rows[rank] * width, starts[rank]) for rank in workers.own_ranks)
    count = shares[-1].stop
    if root is not None and root not in workers.own_ranks:
        return Partition(count, plan, (), mine, Window((own.start,)), Window(), 0, {}, width)
    pieces = merge_adjacent([(starts[rank], rows[rank]) for rank in range(len(rows))], width)
    receivers = workers.own_ranks if root is None else (root,)
    everyone = dict.fromkeys(receivers, pieces)
    return Partition(count, plan, mine, (), Window(), Window(), count, everyone, width, tuple(shares))


def _partition_scatter(workers: RanksByWorker, sizes: Sequence[int], width: int, root: int) -> Partition:
    starts = _compute_starts(workers.all_ranks, sizes, width)
    leaf = _compute_starts(range(len(sizes)), sizes, width)
    shares = _compute_place_spans(workers, sizes, width)
    own = shares[workers.place]
    plan = all_to_all.scatter(range(len(shares)), workers.place, shares, workers.place_of(root))
    local: tuple[RowRange, ...] = ()
    sent: tuple[RowRange, ...] = ()
    if root in workers.own_ranks:
        local = tuple(_make_range(root, leaf, sizes, width, to, starts[to] - own.start) for to in workers.own_ranks)
        others = [rank for rank in workers.all_ranks if rank not in workers.own_ranks]
        sent = tuple(_make_range(root, leaf, sizes, width, to, starts[to]) for to in others)
    pieces = {rank: merge_adjacent([(starts[rank] - own.start, sizes[rank])], width) for rank in workers.own_ranks}
    return Partition(shares[-1].stop, plan, local, sent, Window(), Window((own.start,)), len(own), pieces, width)


def _partition_reduce_scatter(workers: RanksByWorker, sizes: Sequence[int], width: int) -> Partition:
    starts = _compute_starts(workers.all_ranks, sizes, width)
    leaf = _compute_starts(range(len(sizes)), sizes, width)
    shares = _compute_place_spans(workers, sizes, width)
    own = shares[workers.place]
    plan = ring.reduce_scatter(range(len(shares)), workers.place, shares)
    folded = tuple(
        _make_range(rank, leaf, sizes, width, to, starts[to]) for rank in workers.own_ranks for to in workers.all_ranks
    )
    pieces = {rank: merge_adjacent([(starts[rank] - own.start, sizes[rank])], width) for rank in workers.own_ranks}
    window = Window((own.start,))
    return Partition(shares[-1].stop, plan, (), folded, Window(), window, len(own), pieces, width, tuple(shares))


def _partition_all_to_all(workers: RanksByWorker, rows: Rows, width: int) -> Partition:
    """In a block between two places, rows stand by receiver and then by sender."""
    places = range(len(workers.ranks_by_place))
    table: list[list[Span]] = []
    at = 0
    for senders in workers.ranks_by_place:
        row = []
        for receivers in workers.ranks_by_place:
            length = sum(rows[sender][to] for to in receivers for sender in senders) * width
            row.append(Span(at, at + length))
            at += length
        table.append(row)
    plan = all_to_all.all_to_all(places, workers.place, table)
    column = [row[workers.place] for row in table]
    offsets = (0, *accumulate(map(len, column)))
    receiving = Window(tuple(span.start for span in column), offsets[:-1])
    leaves = {sender: _compute_starts(range(len(rows)), rows[sender], width) for sender in workers.own_ranks}

    def positions(senders: Sequence[int], receivers: Sequence[int], start: int) -> dict[tuple[int, int], int]:
        pairs = [(sender, to) for to in receivers for sender in senders]
        lengths = [rows[sender][to] * width for sender, to in pairs]
        return dict(zip(pairs, accumulate(lengths, initial=start), strict=False))

    arrivals: dict[tuple[int, int], int] = {}
    for senders, offset in zip(workers.ranks_by_place, offsets, strict=False):
        arrivals |= positions(senders, workers.own_ranks, offset)
    local: list[RowRange] = []
    sent: list[RowRange] = []
    for place in places:
        to_place = workers.ranks_by_place[place]
        wide = positions(workers.own_ranks, to_place, table[workers.place][place].start)
        for sender in workers.own_ranks:
            for to in to_place:
                target = arrivals[sender, to] if place == workers.place else wide[sender, to]
                part = _make_range(sender, leaves[sender], rows[sender], width, to, target)
                (local if place == workers.place else sent).append(part)
    pieces = {
        to: merge_adjacent([(arrivals[sender, to], rows[sender][to]) for sender in range(len(rows))], width)
        for to in workers.own_ranks
    }
    sending = Window((hull(table[workers.place]).start,))
    return Partition(at, plan, tuple(local), tuple(sent), sending, receiving, offsets[-1], pieces, width)


def _read_input(span: Span, moves: Iterable[WideMove]) -> Iterator[WideMove]:
    """The same moves, but `span` is sent from the input, and not copied to the output."""
    for move in moves:
        match move:
            case FinishMove():
                pass
            case SendMove(peer, sent, Buffer.OUTPUT) if sent == span:
                yield SendMove(peer, span, Buffer.INPUT)
            case _:
                yield move


def _make_range(rank: int, leaf: Mapping[int, int], sizes: Sequence[int], width: int, piece: int, to: int) -> RowRange:
    start = leaf[piece]
    return RowRange(rank, start, start + sizes[piece] * width, to)


def _compute_starts(order: Sequence[int], rows: Sequence[int], width: int) -> dict[int, int]:
    """Where the rows of each rank begin if they stand in that order, in elements."""
    return dict(zip(order, accumulate((rows[rank] * width for rank in order), initial=0), strict=False))


def _compute_place_spans(workers: RanksByWorker, rows: Sequence[int], width: int) -> list[Span]:
    lengths = [sum(rows[rank] for rank in local) * width for local in workers.ranks_by_place]
    stops = list(accumulate(lengths))
    return [Span(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]


def merge_ranges(parts: Sequence[RowRange]) -> list[RowRange]:
    """The same, without empty ones, and with neighbours of one leaf that are neighbours at their target as one."""
    found: list[RowRange] = []
    for part in parts:
        last = found[-1] if found else None
        if part.start == part.stop:
            continue
        is_next = last is not None and (last.rank, last.stop) == (part.rank, part.start)
        if last is not None and is_next and last.target - last.start == part.target - part.start:
            found[-1] = RowRange(part.rank, last.start, part.stop, last.target)
        else:
            found.append(part)
    return found


def find_single_run(parts: Sequence[RowRange]) -> tuple[int, int] | None:
    """(rank, wide position of its leaf's begin) where all parts stand in one leaf as they belong: it can be sent."""
    runs = {(part.rank, part.target - part.start) for part in parts if part.stop > part.start}
    return next(iter(runs)) if len(runs) == 1 else None
