"""Group: an ordered set of ranks, and the collectives among them."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from collectived import site
from collectived.arguments import whole
from collectived.call import Call
from collectived.doorbell import GRACE, Doorbell
from collectived.errors import FailedPreconditionError
from collectived.prepare import Signatures, check_out, locate, take_apart
from collectived.work import Work
from collectived_proto.deadline import Deadline
from collectived_proto.errors import CollectiveError, error_from_verdict
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import AllReduce, Barrier, Broadcast, GroupInfo, Member, Operation, Reduce, ReduceOp

_MOST_DIRECT = 8192  # addresses that fit in one message; values of more leaves are staged
_BARRIER = Barrier()
_NO_OPTIONS = CommunicationOptions()


class Group:
    """One rank's hold on a group; made by `Session.join`. Thread-safe.

    All ranks must submit the same collectives in the same order. Used as a context manager, it leaves at the end, and
    aborts where the block ends by an exception.

    Attributes:
        name: as joined. key: its integer name.
        rank, size: this rank, and how many there are. local_rank, local_size: the same among ranks of one worker.
        device: this rank's device, in full. members: all ranks, in order.
        options: this group's defaults, as given to `join`.
    """

    def __init__(
        self,
        left: Callable[[Group], object],
        info: GroupInfo,
        rank: int,
        doorbell: Doorbell,
        signatures: Signatures,
        options: CommunicationOptions,
        default_timeout: float | None,
    ) -> None:
        self._left = left  # told when this rank leaves
        self.name = info.name
        self.key = info.key
        self.rank = rank
        self.size = info.size
        self.members: tuple[Member, ...] = info.members
        self.device = info.members[rank].device
        local = [member.rank for member in info.members if member.worker == info.members[rank].worker]
        self.local_rank = local.index(rank)
        self.local_size = len(local)
        self.options = options
        self._defaults = CommunicationOptions(timeout_seconds=default_timeout).merge(options)
        self._merged: dict[CommunicationOptions, CommunicationOptions] = {}
        self._reductions: dict[object, AllReduce] = {}
        self._doorbell = doorbell
        self._signatures = signatures
        self._unusable = ""

    @property
    def generation(self) -> int:
        """The incarnation in which the next collective will run."""
        return self._doorbell.standing.generation

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Combines the values of all ranks, element by element; every rank gets the same bits.

        Args:
            reduce_op: `"sum"`, `"mean"` or another `ReduceOp`; the mean of integers is floating.
            value: arrays, numbers or None in any nest of lists, tuples, namedtuples and dicts; the same structure,
                shapes and dtypes on all ranks.
            options: for this call, over the group's.
            async_op: return a `Work` at once.
            out: a nest of the same structure whose arrays take the result; may be `value` itself.

        Returns:
            The result in the structure of `value`: arrays of their own, or, for NumPy arrays from `session.empty`,
            read-only views that the ranks of this host share. With `async_op`, a `Work`.

        Raises:
            TypeError, ValueError: an argument is wrong.
            CollectiveError: the collective failed; the class says what comes next.
        """
        return self._start(self._all_reduce(reduce_op), value, options, experimental_hints, async_op, out)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        root: int = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """As `all_reduce`, but only `root` gets the result; the others get None."""
        operation = Reduce(ReduceOp.of(reduce_op), self._root(root))
        return self._start(operation, value, options, experimental_hints, async_op)

    def broadcast(
        self,
        value: Any,
        root: int = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Gives every rank the value of `root`. On other ranks `value` says the structure, shapes and dtypes."""
        return self._start(Broadcast(self._root(root)), value, options, experimental_hints, async_op)

    def barrier(
        self,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Ends when all ranks have called it; None, or a `Work` with `async_op`."""
        return self._start(_BARRIER, None, options, experimental_hints, async_op)

    def leave(self) -> None:
        """Waits for this rank's collectives in flight and leaves; the others may finish what was fully submitted.

        Raises:
            CollectiveError: a collective that had returned here already has failed on others, or one in flight has,
                and nobody was told; the group is left all the same.
        """
        if self._unusable:
            return
        self._unusable = f"rank {self.rank} has left group {self.name!r}; join it again"
        try:
            unseen = self._doorbell.leave()
        finally:
            self._signatures.forget()
            self._left(self)
        if unseen is not None:
            raise error_from_verdict(unseen)

    def abort(self, reason: str) -> None:
        """Ends this generation on all ranks: what is in flight, and every later call, raises `AbortedError`."""
        self._check_usable()
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a text, which all ranks are shown, got {reason!r}")
        self._doorbell.abort(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._unusable:
            return
        if error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
            self.leave()
            return
        self._doorbell.abort(site.describe(error, traceback))
        try:
            self.leave()
        except CollectiveError as unseen:
            error.add_note(f"group {self.name!r}: {unseen}")

    def __repr__(self) -> str:
        return f"<Group {self.name!r} generation {self.generation}: rank {self.rank} of {self.size} on {self.device}>"

    def _start(
        self,
        operation: Operation,
        value: Any,
        options: CommunicationOptions | None,
        hints: CommunicationOptions | None,
        async_op: bool,
        out: Any = None,
    ) -> Any:
        self._check_usable()
        line = site.caller()
        merged = self._options(options, hints)
        timeout = merged.timeout_seconds
        deadline = Deadline.after(timeout) if timeout else None
        taken = take_apart(value)
        doorbell = self._doorbell
        try:
            doorbell.check_goes_on(line)
            prepared = self._signatures.find(operation, taken, merged, line, deadline)
            located = locate(prepared, taken.arrays)
            call = Call(prepared, taken.arrays, located)
            if out is not None:
                call.out = check_out(prepared, out)
            self._ring(call, located, timeout or 0.0, deadline)
            if async_op:
                return self._work(call)
            doorbell.wait(call)
        except KeyboardInterrupt:  # between ringing and waiting, too
            doorbell.interrupted()
            raise
        if call.verdict is not None:
            raise doorbell.error(call.verdict, line)
        return call.value()

    def _ring(
        self, call: Call, located: list[tuple[int, int] | None] | None, timeout: float, deadline: Deadline | None
    ) -> None:
        addresses: tuple[tuple[int, int], ...] = ()
        if call.arrays:
            if located is not None and None not in located and len(located) <= _MOST_DIRECT:
                addresses = tuple(located)  # type: ignore[arg-type]  # mypy does not see that None is out
            else:
                staging = call.staging = call.prepared.memory.stage(call.prepared)
                for view, array in zip(staging.views, call.arrays, strict=True):
                    np.copyto(view, array)
                addresses = staging.address
                call.arrays = []
        remaining = 0.0
        if deadline is not None:
            call.cut = deadline.at + GRACE
            remaining = deadline.wire()
        self._doorbell.ring(call, timeout, remaining, addresses)

    def _work(self, call: Call) -> Work:
        """The call as a Work; one that cannot ever run any more raises at once, unless the group goes on."""
        if call.verdict is not None and call.instance < 0 and not call.verdict.successor:
            raise self._doorbell.error(call.verdict, call.prepared.site)
        return Work(call, self._doorbell)

    def _options(
        self, options: CommunicationOptions | None, hints: CommunicationOptions | None
    ) -> CommunicationOptions:
        if options is None:
            if hints is None:
                return self._defaults
            options = hints
        elif hints is not None:
            raise ValueError("options and experimental_hints were both given: give options alone")
        if not isinstance(options, CommunicationOptions):
            raise TypeError(f"options must be CommunicationOptions or None, got {type(options).__name__}")
        merged = self._merged.get(options)
        if merged is None:
            if len(self._merged) > 100:  # somebody computes a new timeout for every call
                self._merged.clear()
            merged = self._merged[options] = self._defaults.merge(options)
        return merged

    def _all_reduce(self, reduce_op: ReduceOp | str) -> AllReduce:
        try:
            return self._reductions[reduce_op]
        except (KeyError, TypeError):  # TypeError: an array cannot be looked up
            operation = AllReduce(ReduceOp.of(reduce_op))
            return self._reductions.setdefault(reduce_op, operation)

    def _root(self, root: int) -> int:
        return whole(root, "root", 0, self.size - 1, f"a rank of this group, 0 to {self.size - 1}")

    def _check_usable(self) -> None:
        if self._unusable:
            raise FailedPreconditionError(self._unusable)

    def _after_fork(self) -> None:
        self._unusable = (
            f"group {self.name!r} was joined by the parent of this process; connect and join in the child itself"
        )
        self._doorbell.sever(self._unusable)
        self._signatures.forget()
