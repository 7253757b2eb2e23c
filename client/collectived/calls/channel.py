"""The seam between collectives and the ways to a worker: what `Group`, `Work` and `Call` ask of a way.

Shared memory and a doorbell are one way (`doorbell.Doorbell`, `memory.SharedMemory`, `results.MappedResult`). Another
one brings four things, of which `buffers` has the last three:

- a `RankChannel`: takes calls to the worker and tells them what has become of them;
- a `Describe`: gives a collective that is new to this rank a number and a layout;
- a `StagingArea`: holds the arrays of a call from its submission until the worker has them;
- `ResultBuffer`s: results, laid out as `Layout` says, or, for calls that have `has_result_header`, behind a result
header.

What a route does with a call: `assign_instance` when it has its number; `attach_result` once, before its first pack is
complete, where the call receives a result; `completed_packs.append` for each complete pack (only once, at the end, for
one that is open); `end` after everything else. It does so under one lock, and then wakes who waits and hands the call
to `callbacks.on_call_ended`.
"""

from __future__ import annotations

import math
from typing import Protocol

from collectived.calls.buffers import ArenaAddress
from collectived.calls.call import ALL_PACKS, Call
from collectived.calls.callbacks import Callbacks
from collectived.calls.rank_state import RankState
from collectived_proto.errors import Code, CollectiveError
from collectived_proto.types import Verdict


class RankChannel(Protocol):
    """One rank's way to its worker. Thread-safe.

    Attributes:
        invalid_reason: why it cannot be used in this process, a forked child; '' where it can.
    """

    rank_state: RankState
    callbacks: Callbacks
    invalid_reason: str

    def check_usable(self) -> None:
        """Raises FailedPreconditionError in a forked child."""

    def check_not_over(self, site: str) -> None:
        """Raises the verdict where the generation is over."""

    def submit(self, call: Call, timeout: float, remaining: float, addresses: tuple[ArenaAddress, ...]) -> None:
        """Numbers a call and starts it; where the generation has failed, ends it with the verdict.

        Args:
            timeout, remaining: seconds that the caller gave it, and what is left of them; 0 for none.
            addresses: of each leaf, or of the staging slot where the call has one; () for a call without leaves.

        Raises:
            ResourceExhaustedError: as many calls as allowed are in flight; this one took no number.
        """

    def fail_generation(self, code: Code, message: str, site: str) -> CollectiveError:
        """This rank's worker does not take its next collective: that is the end of the generation.

        What that is to be raised as, or what has ended it before, as may have been heard meanwhile.
        """

    def wait(self, call: Call, packs: int = ALL_PACKS, until: float = math.inf) -> None:
        """Returns when the call has ended or that many packs are complete, or at `until` of the monotonic clock."""

    def wait_on_stream(self, call: Call) -> bool:
        """Makes the caller's streams wait for a call that is launched; False where it has ended, or they cannot."""

    def poll(self) -> None:
        """Takes in what has come, without waiting."""

    def on_interrupt(self) -> None:
        """Ctrl-C came in a call: ends the generation for all ranks."""

    def make_error(self, verdict: Verdict, site: str = "") -> CollectiveError:
        """What a verdict is raised as. From here on the group goes on in the successor generation, if it has one."""

    def abort(self, reason: str) -> None:
        """Ends the generation for all ranks; returns when the worker reads the inputs of calls in flight no more."""

    def cancel(self, why: str) -> None:
        """The session is being closed: calls that a thread waits for end with CancelledError, and none start."""

    def leave(self) -> Verdict | None:
        """Waits for what is in flight and says goodbye; returns a verdict that the caller has not seen."""

    def invalidate_after_fork(self, why: str) -> None:
        """In a forked child: lets go of everything. Takes no lock, for its owner may not exist."""
