"""What one participant holds in its three buffers while plans are checked; `book` has the words."""

from __future__ import annotations

from collectived_runtime.plan.book import FINAL, Book, Segment, Value
from collectived_runtime.plan.collect import Kind, Native
from collectived_runtime.plan.errors import Miscounted, Misordered, Overwritten
from collectived_runtime.plan.intervals import Intervals
from collectived_runtime.plan.moves import Buffer, Finish, Recv, Send, Span


class Holdings:
    """The three buffers of one participant."""

    __slots__ = ("_book", "_finished", "_me", "_mine", "_partial", "_spent", "_tree", "_unit")

    def __init__(self, me: int, book: Book) -> None:
        self._me, self._book = me, book
        self._tree = book.bit[me]
        self._unit = 1 << self._tree
        self._mine = book.goal.inputs.get(me, ())
        self._partial: list[Segment] = []
        self._spent = Intervals()
        self._finished = Intervals()

    def read(self, span: Span, source: Buffer) -> Value:
        start, stop = span.start, span.stop
        if start >= stop:
            return []
        if source is Buffer.OUTPUT:
            if not self._finished.covers(start, stop):
                raise Overwritten(f"{self._me} reads OUTPUT {span} before it is finished")
            return FINAL
        return self._read_input(span) if source is Buffer.INPUT else self._read_scratch(span)

    def _read_input(self, span: Span) -> list[Segment]:
        if self._spent.overlaps(span.start, span.stop) or self._finished.overlaps(span.start, span.stop):
            raise Overwritten(f"{self._me} reads INPUT {span} after it has written there")
        for mine in self._mine:
            if mine.start <= span.start and span.stop <= mine.stop:
                return [(span.start, span.stop, self._unit, self._tree)]
        raise Overwritten(f"{self._me} reads INPUT {span}, of which it has nothing to contribute")

    def _read_scratch(self, span: Span) -> list[Segment]:
        found = []
        reached = span.start
        for start, stop, mask, tree in self._partial:
            if stop > span.start and start < span.stop and start <= reached:
                reached = min(stop, span.stop)
                found.append((max(start, span.start), reached, mask, tree))
        if reached < span.stop:
            raise Overwritten(f"{self._me} reads SCRATCH {span}, where it holds nothing from {reached} on")
        return found

    def hand_on(self, send: Send) -> None:
        """A partial sum that has been sent lives on at the receiver only."""
        self._forget(send.span)

    def finish(self, move: Finish) -> None:
        value = self.read(move.span, move.source)
        if value is FINAL:
            raise Overwritten(f"{self._me} finishes {move.span} twice")
        self._book.finished(self._me, value)
        self._write_output(move.span)

    def receive(self, move: Recv, source: Buffer, value: Value) -> None:
        if move.span.start >= move.span.stop:
            return
        if move.target is Buffer.OUTPUT:
            self._receive_final(move, source, value)
        elif move.target is Buffer.INPUT or value is FINAL:
            raise Overwritten(f"{self._me} receives into {move.target.name} what does not belong there: {move}")
        else:
            if move.fold is not None:
                mine = self.read(move.span, move.fold.mine)
                if mine is FINAL:
                    raise Overwritten(f"{self._me} folds into a final value: {move}")
                left, right = (value, mine) if move.fold.received_left else (mine, value)
                value = self._fold(left, right)
            self._write_scratch(move.span, value)

    def fold_all(self, values: list[Value], span: Span) -> None:
        """Fold all of `values`, left to right, into SCRATCH."""
        folded = values[0]
        for value in values[1:]:
            if folded is FINAL or value is FINAL:
                raise Overwritten(f"{self._me} folds a final value in {span}")
            folded = self._fold(folded, value)
        if folded is not FINAL:
            self._write_scratch(span, folded)

    def take_part(self, native: Native, values: list[Value]) -> None:
        """What an engine leaves with me."""
        at_root = native.root == self._me
        if native.kind is Kind.ALL_REDUCE or (native.kind is Kind.REDUCE and at_root):
            self.fold_all(values, native.span)
        elif native.kind is Kind.BROADCAST and not at_root:
            self._write_output(native.span)

    def _receive_final(self, move: Recv, source: Buffer, value: Value) -> None:
        if move.fold is not None:
            raise Overwritten(f"{self._me} folds into OUTPUT, where nothing is rounded: {move}")
        if source is Buffer.SCRATCH:
            raise Miscounted(f"{self._me} receives into OUTPUT {move.span} what {move.peer} has not finished")
        if value is not FINAL:
            # An INPUT that is moved and never folded is final as it is.
            self._book.finished(self._me, value)
        self._write_output(move.span)

    def _write_scratch(self, span: Span, value: list[Segment]) -> None:
        if self._finished.overlaps(span.start, span.stop):
            raise Overwritten(f"{self._me} writes SCRATCH {span} after it has written OUTPUT there")
        self._forget(span)
        self._partial = sorted(self._partial + value) if self._partial else value
        self._spent.add(span.start, span.stop)

    def _write_output(self, span: Span) -> None:
        if self._finished.overlaps(span.start, span.stop):
            raise Overwritten(f"{self._me} writes OUTPUT {span} twice")
        self._forget(span)
        self._finished.add(span.start, span.stop)

    def _forget(self, span: Span) -> None:
        if not self._partial:
            return
        kept = []
        for start, stop, mask, tree in self._partial:
            if start < span.start:
                kept.append((start, min(stop, span.start), mask, tree))
            if stop > span.stop:
                kept.append((max(start, span.stop), stop, mask, tree))
        self._partial = kept

    def _fold(self, left: list[Segment], right: list[Segment]) -> list[Segment]:
        folded = []
        for start, stop, a, b in _common(left, right):
            if a[2] & b[2]:
                raise Miscounted(f"{self._me} folds {self._book.names(a[2] & b[2])} twice into {Span(start, stop)}")
            if a[2] & -a[2] > b[2] & -b[2]:
                names = self._book.names
                raise Misordered(f"{self._me} folds {Span(start, stop)} with {names(a[2])} left of {names(b[2])}")
            folded.append((start, stop, a[2] | b[2], hash((a[3], b[3]))))
        return folded

    def must_be_complete(self) -> None:
        """Everything that the goal wants is in OUTPUT, and nothing else."""
        wanted = Intervals()
        for span in self._book.goal.outputs.get(self._me, ()):
            wanted.add(span.start, span.stop)
            if not self._finished.covers(span.start, span.stop):
                raise Miscounted(f"{self._me} ends without all of {span}")
        if wanted != self._finished:
            raise Miscounted(f"{self._me} ends with more than it should have")


def _common(left: list[Segment], right: list[Segment]) -> list[tuple[int, int, Segment, Segment]]:
    """The runs on which both of two values are one segment; both cover the same span."""
    if len(left) == len(right) == 1:
        return [(left[0][0], left[0][1], left[0], right[0])]
    runs = []
    at = beside = 0
    while at < len(left):
        start = max(left[at][0], right[beside][0])
        stop = min(left[at][1], right[beside][1])
        runs.append((start, stop, left[at], right[beside]))
        at, beside = at + (left[at][1] == stop), beside + (right[beside][1] == stop)
    return runs
