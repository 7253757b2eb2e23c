"""Group: an ordered set of ranks; how its collectives are started, and how it ends."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self, cast

import numpy as np

from collectived import call_site, sparse_reduce
from collectived.arguments import check_integer
from collectived.calls.buffers import ArenaAddress
from collectived.calls.call import Call
from collectived.calls.channel import NOT_REPEATED
from collectived.calls.local_failure import classify_failure, is_refusal
from collectived.calls.prepare import (
    ANY_VALUE,
    CrossDeviceTerms,
    FlatValue,
    fetch_value_to_host,
    flatten_value,
    locate,
    may_be_repeated,
    move_value_axis_first,
)
from collectived.calls.timeout import DEADLINE_GRACE
from collectived.calls.unobserved_errors import UnobservedErrors, is_consequence
from collectived.collectives import Collectives
from collectived.connection.join_request import JoinRequest, make_rejoin_request, make_split_request
from collectived.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
)
from collectived.session_hooks import JoinedRank, SessionHooks
from collectived.work import Work
from collectived_proto.cause import Cause
from collectived_proto.deadline import Deadline
from collectived_proto.errors import CollectiveError, error_from_verdict
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import AllReduce, AxisOperation, Member, Operation, Recv, Reduce

_STAGING_TIMEOUT = 30.0  # seconds in which a worker makes room for a value


_TOLD = (CollectiveError, TypeError, ValueError)  # a verdict, or why the caller's `out` cannot take the result


class _CallTerms(NamedTuple):
    """One call of the caller's: what it is, and under which conditions. `site` is the caller's line."""

    operation: Operation
    options: CommunicationOptions
    site: str
    deadline: Deadline | None
    async_op: bool
    special: CrossDeviceTerms | None


class Group(Collectives):
    """One rank's hold on a group; made by `Session.join`. Thread-safe.

    All ranks must submit the same collectives in the same order. Used as a context manager, it leaves at the end, and
    aborts if the block ends by an exception. The rules for all collectives are at `Collectives`.

    Attributes:
        name: as joined. key: its integer name.
        rank, size: this rank, and the number of ranks. local_rank, local_size: the same among ranks of one worker.
        device: this rank's device, in full.
        members: all ranks, in order; after `rejoin`, `last_instance` of each is the last one that it is known to have
            finished in the generation before.
        options: this group's defaults, as given to `join`.
    """

    def __init__(
        self,
        home: SessionHooks,
        wish: JoinRequest,
        local_rank: JoinedRank,
        options: CommunicationOptions,
        default_timeout: float | None,
    ) -> None:
        self._session = home
        self._join_request = wish  # as this group was joined
        self.options = options
        self._default_timeout = default_timeout
        self._defaults = CommunicationOptions(timeout_seconds=default_timeout).merge(options)
        self._merged: dict[CommunicationOptions, CommunicationOptions] = {}
        self._splits = 0
        self.lends_inputs = False  # whether callers leave the arrays of asynchronous calls alone until these are done
        self._enter_generation(local_rank)

    def _enter_generation(self, local_rank: JoinedRank) -> None:
        info, rank = local_rank.info, local_rank.rank
        self.name = info.name
        self.key = info.key
        self.rank = rank
        self.size = info.size
        self.members: tuple[Member, ...] = info.members
        self.device = info.members[rank].device
        local = [member.rank for member in info.members if member.worker == info.members[rank].worker]
        self.local_rank = local.index(rank)
        self.local_size = len(local)
        self._channel = local_rank.channel
        self._prepared_calls = local_rank.prepared_calls
        self._unobserved_errors = UnobservedErrors(local_rank.channel.rank_state)
        self._is_splitting = False
        self._unusable_reason = ""

    @property
    def generation(self) -> int:
        """In which generation the next collective will run; the number grows whenever the group begins anew."""
        return self._channel.rank_state.generation

    @property
    def waiting(self) -> int:
        """How many processes wait to join this group, as of the last collective whose result was taken.

        The same on all ranks after the same collective, so that all can decide alike to `rejoin` and let them in, as
        long as the group is smaller than the most it was joined for.
        """
        return self._channel.rank_state.waiting

    def rejoin(self, size: int | tuple[int, int] | None = None, *, timeout: float | timedelta | None = None) -> Self:
        """Joins the next generation of this group, with the ranks that call it; this rank's number may change.

        To be called by all ranks that want to go on: after an error whose `rejoin` is True, or when others wait to join
        (`waiting`). If the generation still runs, this rank leaves it first.

        Args:
            size: how many ranks, or (least, most); None: as this group was joined.
            timeout: seconds to wait for the others; None and 0: no limit. Every 10 s the ranks that are here are
                printed.

        Returns:
            The group itself, with new `rank`, `size`, `members` and `generation`.

        Raises:
            DeadlineExceededError: not complete in time; the group can be joined again all the same.
            CollectiveError: the worker or the coordinator refuses, or the worker is lost: then connect again.
        """
        if self._channel.invalid_reason:
            raise FailedPreconditionError(self._unusable_reason)
        wish = make_rejoin_request(self._join_request, size, timeout)
        if not self._unusable_reason:
            with contextlib.suppress(CollectiveError):  # that it has failed is why we are here
                self.leave()
        finished = self._channel.rank_state.last_finished  # with what was in flight until then

        def enter(place: JoinedRank) -> Group:
            self._enter_generation(place)
            self._session._register_group(self)
            return self

        # In one line: an error after that would come to a rank that the others take for present.
        return cast(Self, self._session._join_group(replace(wish, last_instance=_known(finished)), enter))

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        """Splits this group: all ranks that give the same color form a group of their own. A collective call.

        If it fails on a rank, this generation of the parent group ends, and so does the split on all ranks.

        Args:
            color: a number that is not negative; None: this rank is in none of them.
            key: ranks of the new group are in order of it, then of their rank here; None: of their rank here.

        Returns:
            The new group, on the same device and with the same options; None where `color` is None.
        """
        expected = "a number that is not negative, or None"
        own = -1 if color is None else check_integer(color, "color", 0, sys.maxsize, expected)
        order = 0 if key is None else check_integer(key, "key", -sys.maxsize, sys.maxsize, "a whole number or None")
        self._check_usable()
        self._is_splitting = True
        try:
            return self._split(own, order)
        except BaseException as error:
            failure = self._on_split_failed(error)
            self._is_splitting = False
            if failure is None:
                raise
            raise failure from None

    def _split(self, own: int, order: int) -> Group | None:
        self._splits += 1
        told = self.all_gather(np.array([[own, order, self._splits]], np.int64)).tolist()
        if own < 0:
            self._is_splitting = False
            return None
        generation, timeout = f"{self.name}/{self.generation}", self._defaults.timeout_seconds
        wish = make_split_request(generation, self.key, self.rank, told, self.device, timeout)

        def enter(place: JoinedRank) -> Group:
            self._is_splitting = False  # here: an error in a line after this would come to a rank that is present
            part = Group(self._session, replace(wish, parent=None), place, self.options, self._default_timeout)
            self._session._register_group(part)
            return part

        return self._session._join_group(wish, enter)

    def _on_split_failed(self, error: BaseException) -> CollectiveError | None:
        """End the generation, because others may wait for this rank. Return the error to raise instead, if any."""
        verdict = error.verdict if isinstance(error, CollectiveError) else None
        if verdict is None:
            if isinstance(error, KeyboardInterrupt):
                self._channel.on_interrupt()
            elif not self._channel.invalid_reason:
                self._channel.abort(call_site.describe_error(error, error.__traceback__))
        elif verdict.generation == self.generation:
            return self._channel.adopt_verdict(verdict)  # the worker got it while this rank waited for its part
        return None

    def leave(self) -> None:
        """Waits for this rank's collectives in flight and leaves; the others may finish those that it fully submitted.

        Raises:
            CollectiveError: a collective that had returned here has failed on others, or one in flight has failed and
                its error was not raised; the group is left nevertheless.
        """
        if self._unusable_reason:
            return
        self._unusable_reason = f"rank {self.rank} has left group {self.name!r}; join it again"
        try:
            unseen = self._channel.leave()
        finally:
            self._prepared_calls.clear()
            self._session._unregister_group(self)
        if unseen is not None:
            self._unobserved_errors.mark_reported(unseen.generation)
            raise error_from_verdict(unseen)

    def abort(self, reason: str) -> None:
        """Ends this generation on all ranks: calls in flight, and every later call, raise `AbortedError`."""
        self._check_usable()
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a text, which all ranks are shown, got {reason!r}")
        self._channel.abort(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._unusable_reason:
            return
        if error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
            self.leave()
            return
        self._channel.abort(call_site.describe_error(error, traceback))
        try:
            self.leave()
        except CollectiveError as unseen:
            if not is_consequence(unseen, error, self.rank):
                error.add_note(f"group {self.name!r}: {unseen}")

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size} on {self.device.rpartition('device:')[2]}>"

    def _start(
        self,
        operation: Operation,
        value: Any,
        options: CommunicationOptions | None,
        hints: CommunicationOptions | None,
        async_op: bool,
        out: Any = None,
        special: CrossDeviceTerms | None = None,
    ) -> Any:
        if self._unusable_reason:
            raise FailedPreconditionError(self._unusable_reason)
        frame = None
        if not (async_op or options or hints or special):
            repeat = self._channel.repeat  # in a call of it Python would look for a method of the class first
            try:
                frame = sys._getframe(2)
            except ValueError:  # a thread that does nothing but this call
                frame = None
            call = None
            try:
                result = repeat(operation, value, out, frame)
                if type(result) is tuple and frame is not None:
                    call = self._channel.resume(result, operation, value, out, frame)
                    return self._channel.take_result(call, call.prepared.site)
                if result is not NOT_REPEATED:
                    return result
            except BaseException as error:
                if call is None or not isinstance(error, _TOLD):  # else this rank is where the others are
                    self._channel.abort_by_error(error)
                raise
        merged, line = self._options(options, hints), call_site.name_frame(call_site.find_caller(2))
        deadline = Deadline.after(merged.timeout_seconds) if merged.timeout_seconds else None
        return self._start_anew(_CallTerms(operation, merged, line, deadline, async_op, special), value, out, frame)

    def _start_anew(self, terms: _CallTerms, value: Any, out: Any, frame: FrameType | None) -> Any:
        """Start a call that the native core cannot repeat. `frame` is its caller's where it may be repeated later."""
        told: tuple[type[Exception], ...] = ()  # errors that leave this rank where the others are; once it has ended
        route = self._channel
        calls: list[Call] = []  # as they are made
        try:
            work = self._submit_value(terms, value, out, calls)
            if terms.async_op:
                return self._raise_if_not_started(work or Work(calls, route, self._unobserved_errors), calls[0])
            for call in calls:
                route.wait(call)
            if work is None and frame is not None and calls[0].verdict is None and may_be_repeated(value):
                route.remember(calls[0], terms.operation, value, frame)
            told = _TOLD
            return route.take_result(calls[0], terms.site) if work is None else work.result()
        except told:
            raise
        except BaseException as error:
            failure = self._on_start_failed(error, terms, calls)
            if failure is None:
                raise
            raise failure from (None if isinstance(error, CollectiveError) else error)  # which it says, or knows better

    def _submit_value(self, terms: _CallTerms, value: Any, out: Any, calls: list[Call]) -> Work[Any] | None:
        """Takes a value apart and submits it; a work where it takes several calls. All of them are put into `calls`."""
        operation = terms.operation
        taken = value if value is ANY_VALUE else flatten_value(value)
        if isinstance(operation, AxisOperation) and taken is not ANY_VALUE:
            operation, taken = move_value_axis_first(operation, taken)
        self._channel.check_not_over(terms.site)
        if taken.sparse_leaves and isinstance(operation, (AllReduce, Reduce)):
            if out is not None:
                raise TypeError(
                    "out cannot take IndexedSlices, for how many rows there will be is not known: leave it out"
                )
            return self._submit_sparse_reduce(operation, taken, terms, calls)
        prepared = self._prepared_calls.get_or_prepare(
            operation, taken, terms.options, terms.site, terms.deadline, terms.special
        )
        arrays = fetch_value_to_host(taken).arrays if prepared.needs_host_copy else taken.arrays
        located = locate(prepared, arrays)
        call = self._channel.make_call(prepared, arrays, located, taken.spec)
        call.is_async, call.is_lent = terms.async_op, self.lends_inputs
        calls.append(call)
        if out is not None:
            call.set_out(out)
        if terms.async_op:
            call.request_stream_order()
        else:  # the caller does not write its arrays before this returns
            located = call.export_inputs(located, _remaining_timeout(terms.deadline))
            self._channel.expect_wait(call)
        self._submit(call, located, terms)
        return None

    def _on_start_failed(self, error: BaseException, terms: _CallTerms, calls: list[Call]) -> CollectiveError | None:
        """End the generation, unless the call was refused before it was submitted. Return an error to raise instead.

        A rank whose caller goes on as if a collective had been submitted that was not would be a step behind all
        others.
        """
        route = self._channel
        for call in calls:
            if call.instance < 0:
                call.abandon()
        if route.invalid_reason or (isinstance(error, CollectiveError) and error.verdict is not None):
            return None
        if isinstance(error, KeyboardInterrupt):
            route.on_interrupt()
            return None
        if is_refusal(error) and all(call.instance < 0 for call in calls):
            return None
        what = f"{terms.operation} of group {self.name!r} ({terms.site})"
        if not isinstance(error, Exception):  # such as SystemExit, which a handler of a signal may raise
            route.abort(f"{type(error).__name__} in {what}")
            return None
        cause, text = classify_failure(error)
        if cause is Cause.DEADLINE:
            told = f"{what} did not complete within {terms.options.timeout_seconds:g} s: {text}"
            if isinstance(terms.operation, Recv) and all(call.instance < 0 for call in calls):
                return DeadlineExceededError(told)  # a receive ends alone, and no other rank knows of this one
        else:
            told = f"{what} could not be started: {text}; join again"
        return route.fail_generation(cause, told, terms.site)

    def _submit_sparse_reduce(
        self, operation: AllReduce | Reduce, taken: FlatValue, terms: _CallTerms, calls: list[Call]
    ) -> Work[Any]:
        """A value with sparse leaves. Everything that can be refused is, before the first collective starts."""
        parts = sparse_reduce.split_sparse(operation, fetch_value_to_host(taken), self.size)
        found = [
            self._prepared_calls.get_or_prepare(
                part.operation,
                part.value,
                terms.options,
                terms.site,
                terms.deadline,
                None if part.sparse_leaves else terms.special,
                whole=False,
            )
            for part in parts
        ]
        sparse_reduce.check_rebuildable(found, parts, taken)
        places = []
        for prepared, part in zip(found, parts, strict=True):
            located = locate(prepared, part.value.arrays)
            call = self._channel.make_call(prepared, part.value.arrays, located, part.value.spec)
            call.is_async = True  # several are in flight at a time
            calls.append(call)
            if call.is_staged and (located is None or None in located):
                call.stage(_remaining_timeout(terms.deadline))
            places.append(located)
        for call, located in zip(calls, places, strict=True):
            self._submit(call, located, terms)
        return sparse_reduce.CompositeWork(calls, self._channel, self._unobserved_errors, parts, taken)

    def _submit(self, call: Call, located: list[ArenaAddress | None] | None, terms: _CallTerms) -> None:
        deadline = terms.deadline
        addresses: tuple[ArenaAddress, ...] = ()
        if call.has_input_event:
            call.reserve_output(_remaining_timeout(deadline))  # first: where there is no room, nothing has been copied
        if call.arrays and call.is_staged:
            if call.prepared.reads_in_place and located is not None and None not in located:
                addresses = tuple(located)  # type: ignore[arg-type]  # mypy does not see that None is out
            else:
                call.stage(_remaining_timeout(deadline))
        if call.staging is not None:
            addresses = call.staging.address
        if deadline is not None:
            call.timeout = terms.options.timeout_seconds or 0.0
            call.set_deadline(deadline.at)
        self._channel.submit(call, deadline, addresses)

    def _raise_if_not_started(self, work: Work[Any], first: Call) -> Work[Any]:
        """A work as the caller gets it, unless it could not start.

        Where the group goes on in a successor, an earlier work whose error is not collected yet may be in the caller's
        hands: then this one is to end alike, as on ranks that the error reached later.
        """
        verdict = first.verdict
        if (
            verdict is None
            or first.instance >= 0
            or (verdict.successor and not self._unobserved_errors.should_raise(verdict))
        ):
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
            if len(self._merged) > 100:  # the program computes a new timeout for every call
                self._merged.clear()
            merged = self._merged[options] = self._defaults.merge(options)
        return merged

    def _check_usable(self) -> None:
        if self._unusable_reason:
            raise FailedPreconditionError(self._unusable_reason)

    def _cancel(self, why: str) -> None:
        self._channel.cancel(why, aborts=self._is_splitting)

    def _after_fork(self) -> None:
        self._unusable_reason = (
            f"group {self.name!r} was joined by the parent of this process; connect and join in the child itself"
        )
        self._channel.invalidate_after_fork(self._unusable_reason)
        self._prepared_calls.clear()


def _known(instance: int) -> int | None:
    return None if instance < 0 else instance


def _remaining_timeout(deadline: Deadline | None) -> float:
    """Seconds for what a call needs before it can start."""
    return _STAGING_TIMEOUT if deadline is None else min(_STAGING_TIMEOUT, deadline.remaining() + DEADLINE_GRACE)
