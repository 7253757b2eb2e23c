"""A call: one instance of a prepared collective, from its submission until its result is collected."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

import numpy as np

from collectived.arguments import escape_surrogates
from collectived.calls import own_value
from collectived.calls.buffers import ArenaAddress, Backing, ResultBuffer
from collectived.calls.parts import PartwiseCopy, TargetBytes, as_bytes
from collectived.calls.prepare import PreparedCall
from collectived.calls.timeout import DEADLINE_GRACE, GRACE_STEPS, MOST_RENEWALS
from collectived.errors import InternalError
from collectived.values import nest
from collectived.values.copying import copy_into, copy_of
from collectived.values.leaves import Array
from collectived.values.new_arrays import make_array
from collectived.values.targets import Targets, check_fits, flatten_out
from collectived_proto.deadline import Patience
from collectived_proto.ipc import messages
from collectived_proto.ipc.result_header import OWN_ROWS
from collectived_proto.types import Verdict

ALL_PACKS = 1 << 30  # "wait for all packs"
LAUNCHED = -1  # "wait until all of it is on the device", of calls that are ordered


class UnobservedErrorSink(Protocol):
    """Receives the error of a call whose `Work` was dropped: the group's `UnobservedErrors`."""

    def record(self, verdict: Verdict) -> bool:
        """Whether `log` is to be called with it."""

    def log(self, verdict: Verdict, site: str) -> None: ...


class Call:
    """Written by its channel under a lock until `complete`, then read by the thread that collects it.

    Attributes:
        completed_packs: numbers of the packs that are complete, in order of completion.
        timeout: seconds that the caller gave it, 0 for none. copy_seconds: those that went into copying its value.
        cutoff: when a wait for it looks whether it gives up by itself; inf where there is no deadline.
        spec: of the caller's own value, whose containers the result is put into.
        result_buffer: where the result lies, from its first pack until it is collected.
        is_staged: whether inputs that do not lie in worker memory are copied there before it is submitted.
        is_async: whether the caller goes on before the call has ended.
        is_lent: whether it leaves its arrays alone until then all the same, so that they are read where they lie.
        has_awaiter: whether a coroutine waits for it. waiter: the thread that waits for it, 0: none.
        takes_parts: whether it takes its result part by part. parts: those that are there, as byte ranges.
        error_sink: receives its error, where its `Work` was dropped while it was in flight.
        output: where on a GPU the worker is to write the result; None: in a result slot.
        has_input_event: whether the worker has to wait for an event before it reads the value; see
            `DeviceCall.record_input_event`.
        is_stream_ordered: whether its caller may go on in stream order, before it has ended; see
            `DeviceCall.request_stream_order`.
        own_value: its arrays, where the result, or rows of it, are taken from there; see `keep_own_value`.
        unread_rows: rows of each leaf that need not be staged; None: all rows are staged.
        probe: the answer of its worker to the question whether it lives, asked before a wait for it gives up.
        source: of a receive from any rank that has ended well: the rank that sent what it brings.
        launched: the event of the worker that stands behind all of it on the device, while it is in flight.
    """

    output: ArenaAddress | None = None
    is_staged = True
    has_input_event = False
    is_stream_ordered = False
    __slots__ = (
        "_backing", "_leaves", "_input_addresses", "_patience", "_renewals", "arrays", "has_awaiter", "callbacks",
        "complete", "is_async", "is_lent", "copy_seconds", "cutoff", "generation", "instance", "launched", "out",
        "completed_packs", "own_value", "prepared", "probe", "retired", "result_buffer", "source", "spec", "staging",
        "_arrival", "error_sink", "parts", "takes_parts", "timeout", "unread_rows", "verdict", "waiter", "waiting",
    )  # fmt: skip

    def __init__(
        self, prepared: PreparedCall, arrays: list[Array], located: list[ArenaAddress | None] | None, spec: nest.Spec
    ) -> None:
        self.prepared = prepared
        self.spec = spec
        self.arrays = arrays  # keeps worker memory from being reused while the worker reads it
        self.staging: Any = None  # a `buffers.StagedInputs`
        self.out: Targets | None = None
        self.timeout = self.copy_seconds = 0.0
        self.cutoff = math.inf
        self._patience: Patience | None = None
        self._renewals = MOST_RENEWALS
        self.probe: Any = None  # a `in_flight.PingReply`
        self.generation = 0
        self.instance = -1
        self.completed_packs: list[int] = []
        self.own_value: list[Array] | None = None
        self.unread_rows: Sequence[range] | None = None
        self.takes_parts = False
        self.parts: list[tuple[int, int]] = []
        self._arrival: PartwiseCopy | None = None
        self.complete = False
        self.retired: tuple[object, ...] = ()  # retired staging, until `release_retired`
        self.launched: messages.Launched | None = None
        self.verdict: Verdict | None = None
        self.source: int | None = None
        self.waiter = 0
        self.waiting = 0  # how many waited to join the group when it ended
        self.result_buffer: Any = None  # a `buffers.ResultBuffer`
        self.callbacks: list[Callable[[], object]] | None = None
        self.has_awaiter = self.is_async = self.is_lent = False
        self.error_sink: UnobservedErrorSink | None = None
        self._input_addresses = located  # which leaves lay in worker memory, so that their results may too
        self._leaves: dict[int, Any] = {}
        self._backing: Backing | None = None

    @property
    def display_number(self) -> str:
        """Its number, for people."""
        post = self.instance >= messages.P2P_BASE
        return f"message {self.instance - messages.P2P_BASE}" if post else f"instance {self.instance}"

    def set_deadline(self, at: float) -> None:
        """Set when its worker is to end it, by the clock of `time.monotonic`: patience with the worker begins then."""
        self._patience = Patience(DEADLINE_GRACE, at, GRACE_STEPS)
        self.cutoff = self._patience.at

    @property
    def patience_end(self) -> float:
        """When a wait for it gives up by itself, unless this process is late; inf where there is no deadline."""
        return self.cutoff if self._patience is None else self._patience.end

    def begin_wait(self, now: float) -> None:
        """Note that no thread has waited for it until now. The time that its worker has had counts all the same."""
        if self._patience is not None:
            self._patience.skip(now)
            self.cutoff = self._patience.at

    @property
    def is_patience_ending(self) -> bool:
        return self._patience is not None and self._patience.is_ending

    def renew_patience(self, now: float) -> bool:
        """Begin to wait anew, for its worker lives; False where that has been done often enough."""
        self._renewals -= 1
        self.probe = None
        self.set_deadline(now)
        return self._renewals >= 0

    def is_overdue(self, now: float) -> bool:
        """Whether the worker has not ended it in time, and a wait for it gives up; to be asked at `cutoff`."""
        if self._patience is None:
            return False
        overdue = self._patience.is_over(now)
        self.cutoff = self._patience.at
        return overdue

    def stage(self, patience: float) -> None:
        """Copy the inputs to where the worker reads them, once it has made room within so many seconds."""
        self.staging = self.prepared.memory.acquire_staging(self.prepared, patience)
        began = monotonic()
        if self.unread_rows is None:
            self.staging.fill(self.arrays)
        else:
            self.staging.fill_without(self.arrays, self.unread_rows)
        self.arrays = []
        self.copy_seconds = monotonic() - began

    def set_out(self, out: object) -> None:
        """Has the result copied into the arrays of `out`, and returned as that, where this rank receives one.

        Raises:
            TypeError, ValueError: they do not take it, as far as is known before it comes.
        """
        prepared = self.prepared
        if not prepared.receives:
            return
        targets = flatten_out(out)
        if not prepared.accepts_any:
            check_fits(targets, escape_surrogates(nest.structure(prepared.spec)), prepared.list_result_types())
        self.out = targets

    def keep_own_value(self, generation: int) -> None:
        """Ask the worker for no copy of its own value: the caller leaves its arrays alone until the call has ended.

        Args:
            generation: the one in which it is about to start.
        """
        targets = None if self.out is None else self.out.views
        if self._input_addresses is None and own_value.can_keep(self.prepared, self.arrays, targets):
            self.own_value = self.arrays
            self.unread_rows = own_value.list_unread(self.prepared, generation)

    @property
    def is_own_value(self) -> bool:
        """Whether the result is nothing but its own value, so that none comes."""
        return self.own_value is not None and self.prepared.result_spec is None

    @property
    def has_result_elsewhere(self) -> bool:
        """Whether the result does not come in a slot."""
        return self.output is not None or self.is_own_value

    def begin_lending(self) -> int:
        """Let the arrays be read and written where they lie, if that can be; a flag of `messages.Submit`, or 0.

        It has its number and is about to be sent.
        """
        return 0

    def request_parts(self, are_sound: bool) -> None:
        """Ask the worker to announce parts of the result, which are taken while a thread waits for the call.

        Args:
            are_sound: whether no part comes before it is known that all ranks agree, or no reader would see it.
        """
        prepared = self.prepared
        is_known = prepared.receives and not (prepared.accepts_any or prepared.is_p2p)
        on_host = prepared.device_area is None and not any(kind.is_device for kind in prepared.kinds)
        is_copied = self._input_addresses is None and not self.is_own_value
        self.takes_parts = are_sound and is_known and on_host and is_copied

    def take_parts(self) -> None:
        """Copies what has come of the result. The thread that waits for the call calls it."""
        if not self.parts:
            return
        parts, self.parts = self.parts, []
        if self._arrival is None:
            self._arrival = self._begin_arrival()
        for start, stop in parts:
            self._arrival.copy(start, stop)

    def _begin_arrival(self) -> PartwiseCopy:
        """Decides where each leaf goes; those that do not lie there as they come are left for the end."""
        segments: list[TargetBytes] = []
        for index, (dtype, shape, pieces) in enumerate(self._list_pieces()):
            target = make_array(shape, dtype) if self.out is None else self.out.views[index]
            memory = as_bytes(target) if type(target) is np.ndarray and target.dtype == dtype else None
            if memory is None:
                continue
            self._leaves[index] = (
                self.prepared.kinds[index].restore(target) if self.out is None else self.out.leaves[index]
            )
            at = 0
            for start, nbytes in pieces:
                if not start & OWN_ROWS:
                    segments.append(TargetBytes(start, memory[at : at + nbytes]))
                at += nbytes
            self._copy_own_rows(index, target)
        return PartwiseCopy(self.result_buffer.memory, self.result_buffer.offset, segments)

    def _copy_own_rows(self, index: int, target: Array) -> None:
        """Copy to `target` those rows of a leaf of the result that are its own and do not come."""

    def _list_pieces(self) -> list[tuple[np.dtype[Any], tuple[int, ...], list[tuple[int, int]]]]:
        """Of each leaf of the result its dtype and shape, and where its bytes lie: from where on, and how many."""
        places = self.prepared.result_locations
        return [(dtype, shape, [(at, math.prod(shape) * dtype.itemsize)]) for at, dtype, shape in places]

    @property
    def is_out_intact(self) -> bool:
        """Whether nothing has been written into `out`."""
        return self.out is None or not self._leaves

    def assign_instance(self, generation: int, instance: int) -> None:
        """It has its number and is about to be sent."""
        self.generation = generation
        self.instance = instance

    def reserve_output(self, patience: float) -> None:
        """Of calls that mark: has room for the result within so many seconds."""

    def record_input_event(self, number: int, events: dict[int, int]) -> bytes:
        raise InternalError(f"{self.prepared.op} does not wait for an event")

    def export_inputs(
        self, located: list[ArenaAddress | None] | None, patience: float
    ) -> list[ArenaAddress | None] | None:
        """Where the leaves lie, those in memory of the caller's own too as far as the worker can read it there.

        Args:
            located: those in worker memory. patience: seconds in which the worker finds others, the first time.
        """
        return located

    def request_stream_order(self) -> None:
        """Its caller would rather go on in stream order, if that can be."""

    def open_event(self, handle: bytes) -> int:
        raise InternalError(f"{self.prepared.op} is not carried in stream order")

    def wait_event(self, event: int) -> bool:
        raise InternalError(f"{self.prepared.op} is not carried in stream order")

    def attach_result(self, slot: ResultBuffer) -> None:
        """The result, or the part of it that is complete, lies here.

        Raises:
            ValueError: what lies there is no result of this collective.
        """
        self.result_buffer = slot

    @property
    def is_running(self) -> bool:
        """Whether the ranks of this host are still at it."""
        return False

    def is_ready(self, packs: int = ALL_PACKS) -> bool:
        """Whether that many packs are complete, or the call has ended."""
        return self.complete or len(self.completed_packs) >= packs

    def end(self, verdict: Verdict | None = None, retire: bool = False) -> None:
        """The last message about this call has come. With `retire`, the worker may still be reading its inputs."""
        self.verdict = verdict
        memory = self.prepared.memory
        if retire:
            self.retired += (memory.retire(self.staging, self.arrays),)
        elif self.staging is not None:
            memory.release_staging(self.prepared, self.staging)
        self.staging = None
        self.arrays = []
        self.complete = True

    def abandon(self) -> None:
        """It is not sent after all; copies into its staging may be under way."""

    def release_retired(self) -> None:
        """The worker reads its inputs no more after all: their places may serve again."""
        for one in self.retired:
            self.prepared.memory.release_retired(one)
        self.retired = ()

    def take_value(self) -> Any:
        """The result in the structure of the value, or `out`; None where this rank receives nothing. Call it once."""
        if not self.prepared.receives:
            return None
        leaves = self._build_leaves()
        self._let_go()
        return nest.unflatten(self.spec, leaves) if self.out is None else self.out.whole

    def copy_to_out(self) -> None:
        """Copies the result into `out`, if it was given and fits; done once, however often it is asked for."""
        if self.out is not None and self.verdict is None:
            self._build_leaves()

    def sync_out_streams(self) -> None:
        """Make later work on the caller's current streams wait for the copies into `out`."""

    def take_leaves(self) -> list[Any]:
        """The same without its structure: the leaves."""
        leaves = self._build_leaves() if self.prepared.receives else []
        self._let_go()
        return leaves

    def _finish_arrival(self) -> None:
        """Copies what is left of a result of which parts have been taken."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.finish()

    def _let_go(self) -> None:
        """Views hold the slot; without any, it is released here."""
        self.result_buffer = self._backing = self.own_value = None

    def _build_leaves(self) -> list[Any]:
        kinds = self.prepared.kinds
        self._finish_arrival()
        if self.result_buffer is None and not self.is_own_value:  # a value without leaves
            return []
        if self.out is not None or self._leaves:
            return [self._get_leaf(index) for index in range(len(kinds))]
        # The common cases, quick: every leaf becomes a copy, or those in worker memory views.
        views = self._list_views()
        backing = None if self._input_addresses is None else self._get_backing(self.prepared.layout.result_bytes)
        if backing is None or self._input_addresses is None:
            return [kind.restore(copy_of(view)) for kind, view in zip(kinds, views, strict=True)]
        return [
            np.ndarray(shape, dtype, backing, offset)
            if where is not None and kind.can_share
            else kind.restore(copy_of(view))
            for kind, view, where, (offset, dtype, shape) in zip(
                kinds, views, self._input_addresses, self.prepared.result_locations, strict=True
            )
        ]

    def get_pack_leaves(self, pack: int) -> list[tuple[nest.KeyPath, Any]]:
        """(path, result) of the leaves of a complete pack; nothing where this rank receives nothing."""
        prepared = self.prepared
        if not prepared.receives:
            return []
        paths = nest.key_paths(self.spec)
        return [(paths[index], self._get_leaf(index)) for index in prepared.list_pack_leaves(pack)]

    def _get_leaf(self, index: int) -> Any:
        leaves = self._leaves
        if index not in leaves:
            leaves[index] = self._build_leaf(index)
        return leaves[index]

    def _build_leaf(self, index: int) -> Any:
        view = self._list_views()[index]
        if self.out is not None:
            target = self.out.views[index]
            if self.own_value is None or not own_value.is_same(view, target):
                copy_into(target, view)
            return self.out.leaves[index]
        kind = self.prepared.kinds[index]
        if kind.can_share and self._input_addresses is not None and self._input_addresses[index] is not None:
            backing = self._get_backing(self.prepared.layout.result_bytes)
            if backing is not None:
                offset, dtype, shape = self.prepared.result_locations[index]
                return np.ndarray(shape, dtype, backing, offset)
        return kind.restore(copy_of(view))

    def _list_views(self) -> list[Array]:
        """The arrays from which the result is copied."""
        if self.own_value is not None:
            return self.own_value
        if self.result_buffer is None:
            raise InternalError(f"{self.prepared.op} has no result")  # the doorbell lets no such call end well
        return self.prepared.views(self.result_buffer)

    def _get_backing(self, nbytes: int) -> Backing | None:
        """The slot as a base of views; None where results must be copies."""
        if self._backing is None and self.result_buffer is not None:
            self._backing = self.result_buffer.acquire_backing(nbytes)
            if self._backing is None:
                self._input_addresses = None  # too much is held: copies, for all leaves of this call
        return self._backing
