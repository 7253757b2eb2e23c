"""The three buffers of one participant while plans are checked; `book` has the words."""

from __future__ import annotations

from collectived_runtime.plan.errors import BufferOverwrite, ContributionError, FoldOrderError
from collectived_runtime.plan.intervals import Intervals
from collectived_runtime.plan.moves import Buffer, FinishMove, RecvMove, SendMove, Span
from collectived_runtime.plan.verify.fold_trees import FINAL, FoldTrees, Segment, Value
from collectived_runtime.plan.wide_moves import NativeKind, NativeMove


class ParticipantBuffers:
    """The three buffers of one participant."""

    __slots__ = (
        "_trees",
        "_finished",
        "_participant",
        "_inputs",
        "_partial",
        "_scratch_written",
        "_own_tree",
        "_own_mask",
    )

    def __init__(self, me: int, book: FoldTrees) -> None:
        self._participant, self._trees = me, book
        self._own_tree = book.bits[me]
        self._own_mask = 1 << self._own_tree
        self._inputs = book.goal.inputs.get(me, ())
        self._partial: list[Segment] = []
        self._scratch_written = Intervals()
        self._finished = Intervals()

    def read(self, span: Span, source: Buffer) -> Value:
        start, stop = span.start, span.stop
        if start >= stop:
            return []
        if source is Buffer.OUTPUT:
            if not self._finished.covers(start, stop):
                raise BufferOverwrite(f"{self._participant} reads OUTPUT {span} before it is finished")
            return FINAL
        return self._read_input(span) if source is Buffer.INPUT else self._read_scratch(span)

    def _read_input(self, span: Span) -> list[Segment]:
        if self._scratch_written.overlaps(span.start, span.stop) or self._finished.overlaps(span.start, span.stop):
            raise BufferOverwrite(f"{self._participant} reads INPUT {span} after it has written there")
        for mine in self._inputs:
            if mine.start <= span.start and span.stop <= mine.stop:
                return [(span.start, span.stop, self._own_mask, self._own_tree)]
        raise BufferOverwrite(f"{self._participant} reads INPUT {span}, of which it has nothing to contribute")

    def _read_scratch(self, span: Span) -> list[Segment]:
        found = []
        reached = span.start
        for start, stop, mask, tree in self._partial:
            if stop > span.start and start < span.stop and start <= reached:
                reached = min(stop, span.stop)
                found.append((max(start, span.start), reached, mask, tree))
        if reached < span.stop:
            raise BufferOverwrite(f"{self._participant} reads SCRATCH {span}, where it holds nothing from {reached} on")
        return found

    def discard_sent(self, send: SendMove) -> None:
        """A partial sum that has been sent lives on at the receiver only."""
        self._forget(send.span)

    def finish(self, move: FinishMove) -> None:
        value = self.read(move.span, move.source)
        if value is FINAL:
            raise BufferOverwrite(f"{self._participant} finishes {move.span} twice")
        self._trees.record_final(self._participant, value)
        self._write_output(move.span)

    def receive(self, move: RecvMove, source: Buffer, value: Value) -> None:
        if move.span.start >= move.span.stop:
            return
        if move.target is Buffer.OUTPUT:
            self._receive_final(move, source, value)
        elif move.target is Buffer.INPUT or value is FINAL:
            raise BufferOverwrite(
                f"{self._participant} receives into {move.target.name} what does not belong there: {move}"
            )
        else:
            if move.fold is not None:
                mine = self.read(move.span, move.fold.mine)
                if mine is FINAL:
                    raise BufferOverwrite(f"{self._participant} folds into a final value: {move}")
                left, right = (value, mine) if move.fold.received_left else (mine, value)
                value = self._fold(left, right)
            self._write_scratch(move.span, value)

    def fold_all(self, values: list[Value], span: Span) -> None:
        """Fold all of `values`, left to right, into SCRATCH."""
        folded = values[0]
        for value in values[1:]:
            if folded is FINAL or value is FINAL:
                raise BufferOverwrite(f"{self._participant} folds a final value in {span}")
            folded = self._fold(folded, value)
        if folded is not FINAL:
            self._write_scratch(span, folded)

    def apply_native(self, native: NativeMove, values: list[Value]) -> None:
        """Apply the result of an engine's move to this participant."""
        at_root = native.root == self._participant
        if native.kind is NativeKind.ALL_REDUCE or (native.kind is NativeKind.REDUCE and at_root):
            self.fold_all(values, native.span)
        elif native.kind is NativeKind.BROADCAST and not at_root:
            self._write_output(native.span)

    def _receive_final(self, move: RecvMove, source: Buffer, value: Value) -> None:
        if move.fold is not None:
            raise BufferOverwrite(f"{self._participant} folds into OUTPUT, where nothing is rounded: {move}")
        if source is Buffer.SCRATCH:
            raise ContributionError(
                f"{self._participant} receives into OUTPUT {move.span} what {move.peer} has not finished"
            )
        if value is not FINAL:
            # An INPUT that is moved and never folded is final as it is.
            self._trees.record_final(self._participant, value)
        self._write_output(move.span)

    def _write_scratch(self, span: Span, value: list[Segment]) -> None:
        if self._finished.overlaps(span.start, span.stop):
            raise BufferOverwrite(f"{self._participant} writes SCRATCH {span} after it has written OUTPUT there")
        self._forget(span)
        self._partial = sorted(self._partial + value) if self._partial else value
        self._scratch_written.add(span.start, span.stop)

    def _write_output(self, span: Span) -> None:
        if self._finished.overlaps(span.start, span.stop):
            raise BufferOverwrite(f"{self._participant} writes OUTPUT {span} twice")
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
        for start, stop, a, b in _align_segments(left, right):
            if a[2] & b[2]:
                raise ContributionError(
                    f"{self._participant} folds {self._trees.format_names(a[2] & b[2])} twice into {Span(start, stop)}"
                )
            if a[2] & -a[2] > b[2] & -b[2]:
                names = self._trees.format_names
                raise FoldOrderError(
                    f"{self._participant} folds {Span(start, stop)} with {names(a[2])} left of {names(b[2])}"
                )
            folded.append((start, stop, a[2] | b[2], hash((a[3], b[3]))))
        return folded

    def check_complete(self) -> None:
        """Everything that the goal wants is in OUTPUT, and nothing else."""
        wanted = Intervals()
        for span in self._trees.goal.outputs.get(self._participant, ()):
            wanted.add(span.start, span.stop)
            if not self._finished.covers(span.start, span.stop):
                raise ContributionError(f"{self._participant} ends without all of {span}")
        if wanted != self._finished:
            raise ContributionError(f"{self._participant} ends with more than it should have")


def _align_segments(left: list[Segment], right: list[Segment]) -> list[tuple[int, int, Segment, Segment]]:
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
