"""A call: one instance of a prepared collective, from its submission until its result is collected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from collectived.arguments import sendable
from collectived.calls.places import Address, Backing, Slot
from collectived.calls.prepare import Prepared
from collectived.errors import InternalError
from collectived.values import nest
from collectived.values.leaves import Array
from collectived.values.targets import Targets, check_fits, take_targets
from collectived_proto.local import wire
from collectived_proto.types import Verdict

ALL = 1 << 30  # "wait for all packs"
LAUNCHED = -1  # "wait until all of it is on the device", of calls that are ordered


class Dropped(Protocol):
    """Who is told of the error of a call whose `Work` was dropped: the group's `Uncollected`."""

    def note(self, verdict: Verdict) -> bool:
        """Whether `log` is to be called with it."""

    def log(self, verdict: Verdict, site: str) -> None: ...


class Call:
    """Written by its route under a lock until `complete`, then read by whoever collects it.

    Attributes:
        packs: numbers of the packs that are complete, in order of completion.
        timeout: seconds that the caller gave it, 0 for none. copied: those that went into copying its value.
        cut: when a wait for it gives up by itself; inf where there is no deadline.
        spec: of the caller's own value, whose containers the result is put into.
        slot: where the result lies, from its first pack until it is collected.
        awaited: whether a coroutine waits for it.
        uncollected: who is told of its error, where its `Work` was dropped while it was in flight.
        output: where on a GPU the worker is to write the result; None: in a result slot.
        marks: whether the worker has to wait for an event before it reads the value; see `DeviceCall.mark`.
        ordered: whether its caller may go on in stream order, before it has ended; see `DeviceCall.order`.
        launched: the event of the worker that stands behind all of it on the device, while it is in flight.
    """

    output: Address | None = None
    marks = False
    ordered = False
    __slots__ = (
        "_backing", "_leaves", "_shared", "arrays", "awaited", "callbacks", "complete", "copied", "cut", "generation",
        "instance", "launched", "out", "packs", "prepared", "retired", "slot", "spec", "staging", "timeout",
        "uncollected", "verdict", "waiting",
    )  # fmt: skip

    def __init__(
        self, prepared: Prepared, arrays: list[Array], located: list[Address | None] | None, spec: nest.Spec
    ) -> None:
        self.prepared = prepared
        self.spec = spec
        self.arrays = arrays  # keeps worker memory from being reused while the worker reads it
        self.staging: Any = None  # a `places.Staged`
        self.out: Targets | None = None
        self.timeout = self.copied = 0.0
        self.cut = math.inf
        self.generation = 0
        self.instance = -1
        self.packs: list[int] = []
        self.complete = False
        self.retired: tuple[object, ...] = ()  # what was, until it is restored
        self.launched: wire.Launched | None = None
        self.verdict: Verdict | None = None
        self.waiting = 0  # how many waited to join the group when it ended
        self.slot: Any = None  # a `places.Slot`
        self.callbacks: list[Callable[[], object]] | None = None
        self.awaited = False
        self.uncollected: Dropped | None = None
        self._shared = located  # which leaves lay in worker memory, so that their results may too
        self._leaves: dict[int, Any] = {}
        self._backing: Backing | None = None

    @property
    def number(self) -> str:
        """Its number, for people."""
        post = self.instance >= wire.POST
        return f"message {self.instance - wire.POST}" if post else f"instance {self.instance}"

    def fill(self, out: object) -> None:
        """Has the result copied into the arrays of `out`, and returned as that.

        Raises:
            TypeError, ValueError: they do not take it.
        """
        prepared = self.prepared
        targets = take_targets(out)
        check_fits(targets, sendable(nest.structure(prepared.spec)), [place[1:] for place in prepared.result_places])
        self.out = targets

    def start(self, generation: int, instance: int) -> None:
        """It has its number and is about to be sent."""
        self.generation = generation
        self.instance = instance

    def reserve(self, patience: float) -> None:
        """Of calls that mark: has room for the result within so many seconds."""

    def mark(self, number: int, events: dict[int, int]) -> bytes:
        """Of calls that mark."""
        raise InternalError(f"{self.prepared.op} does not wait for an event")

    def lend(self, located: list[Address | None] | None, patience: float) -> list[Address | None] | None:
        """Where the leaves lie, those in memory of the caller's own too as far as the worker can read it there.

        Args:
            located: those in worker memory. patience: seconds in which the worker finds others, the first time.
        """
        return located

    def order(self) -> None:
        """Its caller would rather go on in stream order, if that can be."""

    def open_event(self, handle: bytes) -> int:
        """Of calls that are ordered."""
        raise InternalError(f"{self.prepared.op} is not carried in stream order")

    def follow(self, event: int) -> bool:
        """Of calls that are ordered."""
        raise InternalError(f"{self.prepared.op} is not carried in stream order")

    def receive(self, slot: Slot) -> None:
        """The result, or the part of it that is complete, lies here.

        Raises:
            ValueError: what lies there is no result of this collective.
        """
        self.slot = slot

    def ready(self, packs: int = ALL) -> bool:
        """Whether that many packs are complete, or the call has ended."""
        return self.complete or len(self.packs) >= packs

    def end(self, verdict: Verdict | None = None, retire: bool = False) -> None:
        """The last message about this call has come. With `retire`, the worker may still be reading its inputs."""
        self.verdict = verdict
        memory = self.prepared.memory
        if retire:
            self.retired += (memory.retire(self.staging, self.arrays),)
        elif self.staging is not None:
            memory.keep(self.prepared, self.staging)
        self.staging = None
        self.arrays = []
        self.complete = True

    def abandon(self) -> None:
        """It is not sent after all; copies into its staging may be under way."""

    def restore(self) -> None:
        """The worker reads its inputs no more after all: their places may serve again."""
        for one in self.retired:
            self.prepared.memory.restore(one)
        self.retired = ()

    def value(self) -> Any:
        """The result in the structure of the value, or `out`; None where this rank receives nothing. Call it once."""
        if not self.prepared.receives:
            return None
        leaves = self._all()
        self.slot = self._backing = None  # views hold the slot; without any, it is released here
        return nest.unflatten(self.spec, leaves) if self.out is None else self.out.whole

    def fill_out(self) -> None:
        """Copies the result into `out`, if it was given and fits; done once, however often it is asked for."""
        if self.out is not None and self.verdict is None:
            self._all()

    def reach_out(self) -> None:
        """What the caller puts on its current streams from here on comes after the copies into `out`."""

    def collect(self) -> list[Any]:
        """The same without its structure: the leaves."""
        leaves = self._all() if self.prepared.receives else []
        self.slot = self._backing = None
        return leaves

    def _all(self) -> list[Any]:
        kinds = self.prepared.kinds
        if self.slot is None:  # a value without leaves
            return []
        if self.out is not None or self._leaves:
            return [self._taken(index) for index in range(len(kinds))]
        # The common cases, quick: every leaf becomes a copy, or those in worker memory views.
        views = self.prepared.views(self.slot)
        backing = None if self._shared is None else self._back(self.prepared.layout.result_bytes)
        if backing is None or self._shared is None:
            return [kind.restore(view.copy()) for kind, view in zip(kinds, views, strict=True)]
        return [
            np.ndarray(shape, dtype, backing, offset)
            if where is not None and kind.shares
            else kind.restore(view.copy())
            for kind, view, where, (offset, dtype, shape) in zip(
                kinds, views, self._shared, self.prepared.result_places, strict=True
            )
        ]

    def leaves_of(self, pack: int) -> list[tuple[str, Any]]:
        """(path, result) of the leaves of a complete pack; nothing where this rank receives nothing."""
        prepared = self.prepared
        if not prepared.receives:
            return []
        return [(prepared.paths[index], self._taken(index)) for index in prepared.leaves_of(pack)]

    def _taken(self, index: int) -> Any:
        leaves = self._leaves
        if index not in leaves:
            leaves[index] = self._take(index)
        return leaves[index]

    def _take(self, index: int) -> Any:
        if self.slot is None:
            raise InternalError(f"{self.prepared.op} has no result")  # the doorbell lets no such call end well
        view = self.prepared.views(self.slot)[index]
        if self.out is not None:
            self.out.views[index][...] = view
            return self.out.leaves[index]
        kind = self.prepared.kinds[index]
        if kind.shares and self._shared is not None and self._shared[index] is not None:
            backing = self._back(self.prepared.layout.result_bytes)
            if backing is not None:
                offset, dtype, shape = self.prepared.result_places[index]
                return np.ndarray(shape, dtype, backing, offset)
        return kind.restore(view.copy())

    def _back(self, nbytes: int) -> Backing | None:
        """The slot as a base of views; None where results must be copies."""
        if self._backing is None and self.slot is not None:
            self._backing = self.slot.share(nbytes)
            if self._backing is None:
                self._shared = None  # too much is held: copies, for all leaves of this call
        return self._backing
