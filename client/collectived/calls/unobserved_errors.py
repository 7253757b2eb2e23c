"""Errors of dropped works that no caller has seen: each is logged once, and raised by the next call."""

from __future__ import annotations

import logging

from collectived.calls.rank_state import RankState
from collectived_proto.cause import Cause
from collectived_proto.errors import Code, CollectiveError, error_from_verdict
from collectived_proto.types import Verdict

log = logging.getLogger("collectived")


class UnobservedErrors:
    """Those of one group. Takes no lock, for works are dropped wherever the garbage collector runs."""

    def __init__(self, standing: RankState) -> None:
        self._rank_state = standing
        self._recorded: dict[int, object] = {}  # by generation: the call that noted its verdict
        self._reported_generation = -1  # the generation whose verdict the caller has been given by `leave`

    def mark_reported(self, generation: int) -> None:
        """The caller has been given the verdict of a generation that it has left."""
        self._reported_generation = generation

    def record(self, verdict: Verdict) -> bool:
        """Note that a dropped work has ended with this verdict. Return whether that is to be logged."""
        standing = self._rank_state
        if standing.verdict is None and verdict.generation == standing.generation:  # it is of that work alone
            return True
        me = object()
        return self._is_unreported(verdict) and self._recorded.setdefault(verdict.generation, me) is me

    def log(self, verdict: Verdict, site: str) -> None:
        """Logs what was noted; `site` is where the work was started."""
        log.error("this error was never collected: %s (%s)", error_from_verdict(verdict), site)

    def should_raise(self, verdict: Verdict) -> bool:
        """Whether the next call is to raise it: a work that ended with it was dropped, and the caller knows nothing."""
        return verdict.generation in self._recorded and self._is_unreported(verdict)

    def _is_unreported(self, verdict: Verdict) -> bool:
        unseen = self._rank_state.unreported_verdict
        if unseen is None or unseen.generation != verdict.generation or verdict.generation == self._reported_generation:
            return False
        # The caller knows of its own Ctrl-C by KeyboardInterrupt, even if others decided the verdict.
        own = verdict.generation == self._rank_state.interrupted_generation
        return verdict.code is not Code.ABORTED or not own


def is_consequence(unseen: CollectiveError, error: BaseException, rank: int) -> bool:
    """Whether a verdict that no caller has seen only says that a rank gave up, for the error that the caller has.

    That is this rank's own abort; and where the group went on after an error on all ranks, the abort of the first rank.
    """
    verdict = unseen.verdict
    if verdict is None or verdict.cause is not Cause.ABORTED:
        return False
    told = error.verdict if isinstance(error, CollectiveError) else None
    return verdict.origin == rank or (told is not None and told.successor == verdict.generation)
