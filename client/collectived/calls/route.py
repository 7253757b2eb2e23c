"""The seam between collectives and the ways to a worker: what `Group`, `Work` and `Call` ask of a way.

Shared memory and a doorbell are one way (`doorbell.Doorbell`, `memory.Memory`, `results.ResultSlot`). Another one
brings four things:

- a `Route`: takes calls to the worker and tells them what has become of them;
- a `Describe`: gives a collective that is new to this rank a number and a layout;
- a `Room`: holds the arrays of a call from its submission until the worker has them;
- `Slot`s: results, laid out as `Layout` says, or, for calls that are `outlined`, behind an outline.

What a route does with a call: `start` when it has its number; `receive` once, before its first pack is complete, where
the call receives a result; `packs.append` for each complete pack (only once, at the end, for one that is open); `end`
after everything else. It does so under one lock, and then wakes who waits and hands the call to `callbacks.ended`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from collectived.calls.places import Backing, Stageable
from collectived.values.leaves import Array
from collectived_proto.deadline import Deadline
from collectived_proto.errors import Code, CollectiveError
from collectived_proto.types import Collective, Layout, Verdict

if TYPE_CHECKING:
    from collectived.calls.call import Call
    from collectived.calls.callbacks import Callbacks
    from collectived.calls.standing import Standing

ALL = 1 << 30  # "wait for all packs"

Address = tuple[int, int]  # of bytes in worker memory: (arena, byte offset)

# Describes a collective to the worker, which answers with its number and layout.
Describe = Callable[[Collective, Deadline | None], tuple[int, Layout]]


class Route(Protocol):
    """One rank's way to its worker. Thread-safe.

    Attributes:
        severed: why it cannot be used in this process, a forked child; '' where it can.
    """

    standing: Standing
    callbacks: Callbacks
    severed: str

    def check(self) -> None:
        """Raises FailedPreconditionError in a forked child."""

    def check_goes_on(self, site: str) -> None:
        """Raises the verdict where the generation is over."""

    def ring(self, call: Call, timeout: float, remaining: float, addresses: tuple[Address, ...]) -> None:
        """Numbers a call and starts it; where the generation has failed, ends it with the verdict.

        Args:
            timeout, remaining: seconds that the caller gave it, and what is left of them; 0 for none.
            addresses: of each leaf, or of the staging slot where the call has one; () for a call without leaves.

        Raises:
            ResourceExhaustedError: as many calls as allowed are in flight; this one took no number.
        """

    def give_up(self, code: Code, message: str, site: str) -> CollectiveError:
        """This rank's worker does not take its next collective: that is the end of the generation.

        What that is to be raised as, or what has ended it before, as may have been heard meanwhile.
        """

    def wait(self, call: Call, packs: int = ALL, until: float = math.inf) -> None:
        """Returns when the call has ended or that many packs are complete, or at `until` of the monotonic clock."""

    def glance(self) -> None:
        """Takes in what has come, without waiting."""

    def interrupted(self) -> None:
        """Ctrl-C came in a call: ends the generation for all ranks."""

    def error(self, verdict: Verdict, site: str = "") -> CollectiveError:
        """What a verdict is raised as. From here on the group goes on in the successor generation, if it has one."""

    def abort(self, reason: str) -> None:
        """Ends the generation for all ranks; returns when the worker reads the inputs of calls in flight no more."""

    def withdraw(self, why: str) -> None:
        """The session is being closed: calls that a thread waits for end with CancelledError, and none start."""

    def leave(self) -> Verdict | None:
        """Waits for what is in flight and says goodbye; returns a verdict that the caller has not seen."""

    def sever(self, why: str) -> None:
        """In a forked child: lets go of everything. Takes no lock, for its owner may not exist."""


class Staged(Protocol):
    """Room for the leaves of one call.

    Attributes:
        views: arrays to copy the leaves into.
        address: as `Route.ring` takes it.
    """

    views: list[Array]
    address: tuple[Address, ...]


class Room(Protocol):
    """Where inputs wait for the worker. Thread-safe."""

    def locate(self, array: Array) -> Address | None:
        """Where an array lies that the worker can read as it is; None for all others, which are staged."""

    def stage(self, prepared: Stageable, patience: float = ...) -> Any:
        """A `Staged` for a call of this collective, had within so many seconds."""

    def keep(self, prepared: Stageable, staging: Any) -> None:
        """The worker has read it; it may serve again."""

    def retire(self, staging: Any, arrays: Sequence[Array]) -> None:
        """The worker may still be reading these: they never serve again."""

    def outdated(self, prepared: Stageable) -> None:
        """No more calls of it will come."""


class Slot(Protocol):
    """A result.

    Attributes:
        memory, offset: where it lies; it may be read-only.
        views: of what lies in that memory, by prepared collective and offset; they end with it.
    """

    offset: int

    @property
    def memory(self) -> Any: ...

    @property
    def views(self) -> dict[tuple[int, int], list[Array]]: ...

    def share(self, nbytes: int) -> Backing | None:
        """The slot as a base of read-only views that hold it, asked for once; None where results are to be copied."""
