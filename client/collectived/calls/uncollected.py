"""Errors of works that were dropped before anybody asked for them: each is logged once, and raised by the next call."""

from __future__ import annotations

import logging
import re

from collectived.calls.standing import Standing
from collectived_proto.errors import Code, error_from_verdict
from collectived_proto.types import Verdict

log = logging.getLogger("collectived")


class Uncollected:
    """Those of one group. Takes no lock, for works are dropped wherever the garbage collector runs."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._noted: dict[int, object] = {}  # by generation: who noted its verdict
        self._told = -1  # the generation whose verdict the caller has been given by `leave`

    def told(self, generation: int) -> None:
        """The caller has been given the verdict of a generation that it has left."""
        self._told = generation

    def note(self, verdict: Verdict) -> bool:
        """A work that nobody will ask about has ended with this verdict; whether that is to be logged."""
        standing = self._standing
        if standing.verdict is None and verdict.generation == standing.generation:  # it is of that work alone
            return True
        me = object()
        return self._unknown(verdict) and self._noted.setdefault(verdict.generation, me) is me

    def log(self, verdict: Verdict, site: str) -> None:
        """Logs what was noted; `site` is where the work was started."""
        log.error("nobody collected this error: %s (%s)", error_from_verdict(verdict), site)

    def due(self, verdict: Verdict) -> bool:
        """Whether the next call is to raise it: a work that ended with it was dropped, and the caller knows nothing."""
        return verdict.generation in self._noted and self._unknown(verdict)

    def _unknown(self, verdict: Verdict) -> bool:
        unseen = self._standing.unseen
        if unseen is None or unseen.generation != verdict.generation or verdict.generation == self._told:
            return False
        # Of Ctrl-C here the caller knows by KeyboardInterrupt, whoever puts it into words.
        own = rf"interrupted on rank {self._standing.rank}\b"
        return verdict.code is not Code.ABORTED or not re.search(own, verdict.message)
