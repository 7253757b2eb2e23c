"""The seam between collectives and the ways to a worker: what `Group`, `Work` and `Call` ask of a way.

Shared memory and a doorbell are one way (`doorbell.Doorbell`, `memory.Memory`, `results.ResultSlot`). Another one
brings four things, of which `places` has the last three:

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
from typing import Protocol

from collectived.calls.call import ALL, Call
from collectived.calls.callbacks import Callbacks
from collectived.calls.places import Address
from collectived.calls.standing import Standing
from collectived_proto.errors import Code, CollectiveError
from collectived_proto.types import Verdict


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

    def order(self, call: Call) -> bool:
        """Makes the caller's streams wait for a call that is launched; False where it has ended, or they cannot."""

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
