"""Group: an ordered set of ranks; how its collectives are started, and how it ends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, cast

import numpy as np

from collectived import several, site
from collectived.arguments import whole
from collectived.calls.call import Call
from collectived.calls.device_call import DeviceCall
from collectived.calls.limit import GRACE
from collectived.calls.outlined import OutlinedCall
from collectived.calls.places import Address
from collectived.calls.prepare import OPEN, Prepared, Signatures, Special, Value, cut, locate, on_host, take_apart
from collectived.calls.route import Route
from collectived.calls.uncollected import Uncollected
from collectived.collectives import Collectives
from collectived.connection.wish import Wish, again
from collectived.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from collectived.work import Work
from collectived_proto.deadline import Deadline
from collectived_proto.errors import Code, CollectiveError, error_from_verdict
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import AllReduce, Cutting, GroupInfo, Member, Operation, Reduce, ReduceOp

_PATIENCE = 30.0  # seconds in which a worker makes room for a value


class Seat(NamedTuple):
    """A rank's place in one generation of a group, and its way to the worker."""

    info: GroupInfo
    rank: int
    route: Route
    signatures: Signatures


class Home(Protocol):
    """What a group asks of its session."""

    def _left(self, group: Group) -> None:
        """This rank takes part no longer."""

    def _entered(self, group: Group) -> None:
        """It takes part again."""

    def _seat(self, wish: Wish) -> Seat:
        """Waits for the others, and takes a place among them."""

    def join(
        self,
        name: str,
        size: int,
        *,
        rank: int,
        device: str,
        options: CommunicationOptions,
        timeout: float | None,
    ) -> Group:
        """Joins another group; see `Session.join`."""


class Group(Collectives):
    """One rank's hold on a group; made by `Session.join`. Thread-safe.

    All ranks must submit the same collectives in the same order. Used as a context manager, it leaves at the end, and
    aborts where the block ends by an exception. What holds for all collectives is said at `Collectives`.

    Attributes:
        name: as joined. key: its integer name.
        rank, size: this rank, and how many there are. local_rank, local_size: the same among ranks of one worker.
        device: this rank's device, in full.
        members: all ranks, in order; after `rejoin`, `last_instance` of each is the last one that it is known to have
            finished in the generation before.
        options: this group's defaults, as given to `join`.
    """

    def __init__(
        self, home: Home, wish: Wish, seat: Seat, options: CommunicationOptions, default_timeout: float | None
    ) -> None:
        self._home = home
        self._wish = wish  # as this group was joined
        self.options = options
        self._defaults = CommunicationOptions(timeout_seconds=default_timeout).merge(options)
        self._merged: dict[CommunicationOptions, CommunicationOptions] = {}
        self._reductions: dict[object, AllReduce] = {}
        self._splits = 0
        self._sit(seat)

    def _sit(self, seat: Seat) -> None:
        info, rank = seat.info, seat.rank
        self.name = info.name
        self.key = info.key
        self.rank = rank
        self.size = info.size
        self.members: tuple[Member, ...] = info.members
        self.device = info.members[rank].device
        local = [member.rank for member in info.members if member.worker == info.members[rank].worker]
        self.local_rank = local.index(rank)
        self.local_size = len(local)
        self._route = seat.route
        self._signatures = seat.signatures
        self._uncollected = Uncollected(seat.route.standing)
        self._unusable = ""

    @property
    def generation(self) -> int:
        """The incarnation in which the next collective will run."""
        return self._route.standing.generation

    @property
    def waiting(self) -> int:
        """How many processes wait to join this group, as of the last collective whose result was taken.

        The same on all ranks after the same collective, so that all can decide alike to `rejoin` and let them in, as
        long as the group is smaller than the most it was joined for.
        """
        return self._route.standing.waiting

    def rejoin(self, size: int | tuple[int, int] | None = None, *, timeout: float | timedelta | None = None) -> Self:
        """Joins the next generation of this group, with whoever comes; this rank's number may change.

        To be called by all ranks that want to go on: after an error whose `rejoin` is True, or when others wait to join
        (`waiting`). Where the generation still runs, this rank leaves it first.

        Args:
            size: how many ranks, or (least, most); None: as this group was joined.
            timeout: seconds to wait for the others; None and 0: for ever, saying every 10 s who is here.

        Returns:
            The group itself, with new `rank`, `size`, `members` and `generation`.

        Raises:
            DeadlineExceededError: not complete in time; the group can be joined again all the same.
            CollectiveError: the worker or the coordinator refuses, or the worker is lost: then connect again.
        """
        if self._route.severed:
            raise FailedPreconditionError(self._unusable)
        wish = again(self._wish, size, timeout)
        if not self._unusable:
            with contextlib.suppress(CollectiveError):  # that it has failed is why we are here
                self.leave()
        finished = self._route.standing.finished  # with what was in flight until then
        self._sit(self._home._seat(replace(wish, last_instance=None if finished < 0 else finished)))
        self._home._entered(self)
        return self

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        """Splits this group: all ranks that give the same color form a group of their own. A collective call.

        Args:
            color: a number that is not negative; None: this rank is in none of them.
            key: ranks of the new group are in order of it, then of their rank here; None: of their rank here.

        Returns:
            The new group, on the same device and with the same options; None where `color` is None.
        """
        own = -1 if color is None else whole(color, "color", 0, sys.maxsize, "a number that is not negative, or None")
        order = 0 if key is None else whole(key, "key", -sys.maxsize, sys.maxsize, "a whole number or None")
        self._splits += 1
        name = f"{self.name}/{self.generation}.{self._splits}.{own}"
        pairs = self.all_gather(np.array([[own, order]], np.int64))
        if own < 0:
            return None
        same = sorted((int(pairs[rank, 1]), rank) for rank in range(self.size) if pairs[rank, 0] == own)
        place = [rank for _, rank in same].index(self.rank)
        timeout = self._defaults.timeout_seconds
        return self._home.join(name, len(same), rank=place, device=self.device, options=self.options, timeout=timeout)

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
            unseen = self._route.leave()
        finally:
            self._signatures.forget()
            self._home._left(self)
        if unseen is not None:
            self._uncollected.told(unseen.generation)
            raise error_from_verdict(unseen)

    def abort(self, reason: str) -> None:
        """Ends this generation on all ranks: what is in flight, and every later call, raises `AbortedError`."""
        self._check_usable()
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a text, which all ranks are shown, got {reason!r}")
        self._route.abort(reason)

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
        self._route.abort(site.describe(error, traceback))
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
        *,
        cutting: bool = False,
        comes: bool = False,
        special: Special | None = None,
    ) -> Any:
        if self._unusable:
            raise FailedPreconditionError(self._unusable)
        line = site.caller()
        merged = self._options(options, hints)
        timeout = merged.timeout_seconds
        deadline = Deadline.after(timeout) if timeout else None
        taken = OPEN if comes else take_apart(value)
        if cutting:
            operation, taken = cut(cast(Cutting, operation), taken)
        route = self._route
        try:
            route.check_goes_on(line)
            if taken.sparse and isinstance(operation, (AllReduce, Reduce)):
                return self._start_several(operation, taken, merged, line, deadline, async_op, out, special)
            prepared = self._signatures.find(operation, taken, merged, line, deadline, special)
            arrays = on_host(taken).arrays if prepared.fetches else taken.arrays
            located = locate(prepared, arrays)
            call = _kind(prepared)(prepared, arrays, located, taken.spec)
            if out is not None:
                call.fill(out)
            if async_op:
                call.order()
            else:  # the caller does not write its arrays before this returns
                located = call.lend(located, _patience(deadline))
            self._ring(call, located, timeout or 0.0, deadline)
            if async_op:
                return self._started(Work((call,), route, self._uncollected), call)
            route.wait(call)
        except KeyboardInterrupt:  # between ringing and waiting, too
            route.interrupted()
            raise
        except (DeadlineExceededError, UnavailableError, NotFoundError) as error:
            if error.verdict is not None:
                raise
            raise self._given_up(operation, error, timeout, line) from error
        if call.verdict is not None:
            raise route.error(call.verdict, line)
        route.standing.taken(call)
        return call.value()

    def _given_up(
        self, operation: Operation, error: CollectiveError, timeout: float | None, line: str
    ) -> CollectiveError:
        """This rank's worker did not take a collective: the others wait for it, so the generation is over."""
        what = f"{operation} of group {self.name!r} ({line})"
        if isinstance(error, DeadlineExceededError):
            return self._route.give_up(error.code, f"{what} did not complete within {timeout:g} s: {error}", line)
        why = str(error).removesuffix("; connect again")
        return self._route.give_up(Code.UNAVAILABLE, f"{what} could not be started: {why}; join again", line)

    def _start_several(
        self,
        operation: AllReduce | Reduce,
        taken: Value,
        merged: CommunicationOptions,
        line: str,
        deadline: Deadline | None,
        async_op: bool,
        out: Any,
        special: Special | None,
    ) -> Any:
        """A value with sparse leaves. Everything that can be refused is, before the first collective starts."""
        if out is not None:
            raise TypeError("out cannot take IndexedSlices, for how many rows there will be is not known: leave it out")
        parts = several.parts(operation, on_host(taken), self.size)
        found = [
            self._signatures.find(
                part.operation, part.value, merged, line, deadline, None if part.sparse else special, whole=False
            )
            for part in parts
        ]
        several.check_rebuilds(found, parts, taken)
        calls: list[Call] = []
        places = []
        for prepared, part in zip(found, parts, strict=True):
            located = locate(prepared, part.value.arrays)
            calls.append(_kind(prepared)(prepared, part.value.arrays, located, part.value.spec))
            if located is None or None in located:
                _stage(calls[-1], deadline)
            places.append(located)
        for number, (call, located) in enumerate(zip(calls, places, strict=True)):
            self._ring(call, located, merged.timeout_seconds or 0.0, deadline, calls[:number])
        work = several.Several(calls, self._route, self._uncollected, parts, taken)
        return self._started(work, calls[0]) if async_op else work.result()

    def _ring(
        self,
        call: Call,
        located: list[Address | None] | None,
        timeout: float,
        deadline: Deadline | None,
        earlier: Sequence[Call] = (),
    ) -> None:
        """Starts a call. `earlier` ones of the same submission are waited for where there is no room for it."""
        addresses: tuple[Address, ...] = ()
        if call.marks:
            call.reserve(_patience(deadline))  # first: where there is no room, nothing has been copied
        if call.arrays:
            if call.prepared.direct and located is not None and None not in located:
                addresses = tuple(located)  # type: ignore[arg-type]  # mypy does not see that None is out
            else:
                _stage(call, deadline)
        if call.staging is not None:
            addresses = call.staging.address
        remaining = 0.0
        if deadline is not None:
            call.timeout = timeout
            call.cut = deadline.at + GRACE
            remaining = deadline.wire()
        try:
            self._route.ring(call, timeout, remaining, addresses)
        except ResourceExhaustedError:
            if not earlier:
                call.abandon()
                raise
            for other in earlier:
                self._route.wait(other)
            self._route.ring(call, timeout, remaining, addresses)

    def _started(self, work: Work, first: Call) -> Work:
        """A work as the caller gets it, unless it could not start.

        Where the group goes on in a successor, an earlier work whose error is not collected yet may be in the caller's
        hands: then this one is to end alike, as on ranks that heard of the error later.
        """
        verdict = first.verdict
        if verdict is None or first.instance >= 0 or (verdict.successor and not self._uncollected.due(verdict)):
            return work
        failure = work.exception()
        if failure is not None:
            raise failure
        return work

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

    def _check_usable(self) -> None:
        if self._unusable:
            raise FailedPreconditionError(self._unusable)

    def _withdraw(self, why: str) -> None:
        """The session is being closed: see `Route.withdraw`."""
        self._route.withdraw(why)

    def _after_fork(self) -> None:
        self._unusable = (
            f"group {self.name!r} was joined by the parent of this process; connect and join in the child itself"
        )
        self._route.sever(self._unusable)
        self._signatures.forget()


def _kind(prepared: Prepared) -> type[Call]:
    if prepared.room is not None:
        return DeviceCall
    return Call if prepared.form is None else OutlinedCall


def _stage(call: Call, deadline: Deadline | None) -> None:
    """Copies the arrays of a call to where the worker reads them."""
    call.staging = call.prepared.memory.stage(call.prepared, _patience(deadline))
    began = monotonic()
    call.staging.fill(call.arrays)
    call.arrays = []
    call.copied = monotonic() - began


def _patience(deadline: Deadline | None) -> float:
    """Seconds for what a call needs before it can start."""
    return _PATIENCE if deadline is None else min(_PATIENCE, deadline.remaining() + GRACE)
