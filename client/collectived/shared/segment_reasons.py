"""Why a segment says that nothing completes any more, in the words of a rank whose worker does not say it."""

from __future__ import annotations

from dataclasses import replace

from collectived.calls.call import Call
from collectived.calls.rank_state import RankState
from collectived_native import core
from collectived_proto.cause import Cause
from collectived_proto.types import Verdict

_CAUSES = {
    core.LOST: (Cause.LOST_RANK, "rank {rank} is lost"),
    core.LEFT: (Cause.LEFT, "rank {rank} has left"),
    core.MISMATCH: (Cause.MISMATCH, "rank {rank} differs from another one"),
    core.NONSENSE: (Cause.LOST_RANK, "rank {rank} has written nonsense into shared memory"),
    core.ABORTED: (Cause.ABORTED, "rank {rank} has aborted"),
    core.INTERRUPTED: (Cause.ABORTED, "interrupted on rank {rank}"),
    core.NO_ROOM: (Cause.EXHAUSTED, "there is no memory for it: too much of what rank {rank} sent is not received yet"),
}


def word_end(state: RankState, call: Call, reason: int, culprit: int, worker: str) -> Verdict:
    """Return the verdict on a call that ended for that reason, as the segment says it and the worker does not.

    Args:
        culprit: the seat that ended it: a rank's, for all ranks are of one worker; or the worker, which has the seat
            after theirs.
    """
    if reason == core.DEADLINE:
        return state.make_overdue_verdict(call, worker)
    cause, what = _CAUSES.get(reason, (Cause.ABORTED, "rank {rank} has ended it"))
    named = state.group.members[culprit : culprit + 1]
    number = f"({call.display_number})" if call.prepared.is_p2p else f"#{call.instance}"
    text = what.format(rank=culprit) if named else "its worker has ended it"
    verdict = state.make_verdict(cause, f"{call.prepared.op} {number} of group {state.group.name!r}: {text}", call)
    if reason == core.MISMATCH:  # others may be those who differ
        return verdict
    return replace(verdict, missing=named, origin=culprit if named and verdict.origin is not None else None)
