"""How one worker comes to the verdict that all workers of its generation come to, as a pure step function.

Verdicts come from two sides: the coordinator sends one to every worker, and workers without its answer decide alone and
send each other their decisions. The rule is one for both, in any order of arrival:

- A worker that decides alone sends its verdict to all others. So does a worker that receives one, for the first time or
  a better one: the verdict with the lowest `precedence` is the best. So every worker sends the best verdict that it
  knows.
- A verdict that all have sent alike counts. A worker's verdict only gets better, and two verdicts would need the word
  of every worker each: however long messages take, one verdict comes of it.
- A worker that has not said the same within `listen_seconds` is given up, for it may be dead, and the best verdict then
  counts. This alone depends on time: workers that live agree if a message takes at most a quarter of that.
- A verdict that counts on one worker, and that its clients have, is *final* for the others, which get it so.
- A verdict of the coordinator is final where no worker has sent one. A little later it is one of several, and goes
  before others about the same instance; then it comes too late. So does a verdict that a worker would
  make alone after it has sent one: it waits until the round is over.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from collectived_proto.deadline import Patience
from collectived_proto.types import Verdict

BY_COORDINATOR = "coordinator"
LISTEN_STEPS = 2
_STILL_HEARD = 1 / 3  # of a listening, the coordinator: what it says may take two messages more


@dataclass(frozen=True, slots=True)
class TellVerdict:
    """Send it to all the other workers, or to worker `only`; `final`: clients have it."""

    verdict: Verdict
    final: bool = False
    only: int | None = None


@dataclass(frozen=True, slots=True)
class TakeVerdict:
    """It counts here from now on."""

    verdict: Verdict


AgreementEffect = TellVerdict | TakeVerdict
_Topic = tuple[int, ...]  # ranks that have left in order, for one such rules out no other; `_FAULT` for all faults
_FAULT: _Topic = (-1,)


class VerdictAgreement:
    """The state of one worker in one generation. `others`: the tasks of the other workers that have ranks in it."""

    def __init__(self, listen_seconds: float, others: Collection[int]) -> None:
        self._listen_seconds = listen_seconds
        self._others = frozenset(others)
        self._taken: list[Verdict] = []
        self._announced = 0  # so many of these the others have
        self._best: dict[_Topic, Verdict] = {}  # verdicts that this worker has sent and not taken
        self._words: dict[int, dict[_Topic, Verdict]] = {}  # the last verdicts of each of the others
        self._late: list[Verdict] = []  # verdicts that came when it was too late to send them
        self._patience: Patience | None = None  # with those who have not said the same
        self._heard_until = math.inf  # by the coordinator

    @property
    def next_deadline(self) -> float:
        """When `on_timer` has something to do; inf where no worker has sent a verdict."""
        return math.inf if self._patience is None else self._patience.at

    def decide_alone(self, verdict: Verdict, now: float) -> list[AgreementEffect]:
        """Propose a verdict of this worker, because the coordinator has not answered."""
        if not self._others:
            return self._take(verdict)
        if self._best:
            self._late.append(verdict)
            return []
        return self._propose(verdict, now)

    def hear_coordinator(self, verdict: Verdict, now: float) -> list[AgreementEffect]:
        if not self._best:
            return self._take(verdict)
        self._late.append(verdict)  # where another one is taken it is passed on all the same
        if now > self._heard_until:
            return []
        return self._propose(verdict, now) + self._settle_if_agreed(now)

    def hear_worker(
        self, task: int, verdict: Verdict, final: bool, now: float, improved: Verdict | None = None
    ) -> list[AgreementEffect]:
        """Take a verdict that worker `task` has made or received.

        `improved`: the same with the knowledge of this worker.
        """
        if final:
            return self._take_final(verdict, now)
        self._words.setdefault(task, {})[_topic(verdict)] = verdict
        if self._is_decided(verdict):
            known = [taken for taken in self._taken[: self._announced] if _covers(taken, verdict)]
            return [TellVerdict(taken, final=True, only=task) for taken in known] + self._announce()
        best = min(verdict, improved or verdict, key=precedence)
        return self._propose(best, now) + self._settle_if_agreed(now)

    def on_timer(self, now: float) -> list[AgreementEffect]:
        if self._patience is None or not self._patience.is_over(now):
            return []
        return self._settle(now)

    def _propose(self, verdict: Verdict, now: float) -> list[AgreementEffect]:
        """Send the others the best verdict; before it those taken earlier, which they may be about to take."""
        known = self._best.get(_topic(verdict))
        if self._is_decided(verdict) or (known and precedence(verdict) >= precedence(known)):
            return []
        self._best[_topic(verdict)] = verdict
        if self._patience is None:
            self._patience = Patience(self._listen_seconds, now, LISTEN_STEPS)
            self._heard_until = now + self._listen_seconds * _STILL_HEARD
        return [*self._announce(), TellVerdict(verdict)]

    def _announce(self) -> list[AgreementEffect]:
        """Send the others the verdicts that local clients have, in the same order."""
        unknown, self._announced = self._taken[self._announced :], len(self._taken)
        return [TellVerdict(verdict, final=True) for verdict in unknown]

    def _settle_if_agreed(self, now: float) -> list[AgreementEffect]:
        said = [self._words.get(task, {}) for task in self._others]
        agreed = all(
            topic in words and precedence(words[topic]) == precedence(verdict)
            for topic, verdict in self._best.items()
            for words in said
        )
        return self._settle(now) if self._best and agreed else []

    def _take_final(self, verdict: Verdict, now: float) -> list[AgreementEffect]:
        """Take a verdict that clients have. The wait goes on for topics that it leaves undecided."""
        if self._is_decided(verdict):
            return []
        effects = self._take(verdict)
        self._best = {topic: best for topic, best in self._best.items() if not self._is_decided(best)}
        return effects + (self._settle_if_agreed(now) if self._best else self._settle(now))

    def _settle(self, now: float) -> list[AgreementEffect]:
        """Ends the listening with what was best; of faults and departures the lowest comes first."""
        best, late = sorted(self._best.values(), key=precedence), self._late
        self._best, self._late, self._patience = {}, [], None
        taken = [effect for one in best for effect in self._take(one)]
        effects = self._announce() + taken
        for one in late:  # concerns what is left undecided, if anything is
            if one.decided_by != BY_COORDINATOR:
                effects += self.decide_alone(one, now)
            elif one not in self._taken:
                effects += self.hear_coordinator(one, now)
        return effects

    def _take(self, verdict: Verdict) -> list[AgreementEffect]:
        if verdict.decided_by != BY_COORDINATOR and self._is_decided(verdict):
            return []
        if verdict not in self._taken:
            self._taken.append(verdict)
        return [TakeVerdict(verdict)]

    def _is_decided(self, verdict: Verdict) -> bool:
        return any(_covers(known, verdict) for known in self._taken)


def precedence(verdict: Verdict) -> tuple[int, bool, int, str, bool, _Topic]:
    """Of several verdicts the one with the lowest of these counts; equal ones are of one topic."""
    culprits = (*verdict.missing, *verdict.differing)
    lowest = min((member.rank for member in culprits), default=1 << 32)
    by_worker = verdict.decided_by != BY_COORDINATOR
    return verdict.from_instance, by_worker, lowest, verdict.decided_by, not verdict.orderly, _topic(verdict)


def _topic(verdict: Verdict) -> _Topic:
    return tuple(member.rank for member in verdict.missing) if verdict.orderly else _FAULT


def _covers(known: Verdict, verdict: Verdict) -> bool:
    """Whether one that has been taken decides everything that the other is about."""
    if not known.orderly:
        return known.from_instance <= verdict.from_instance
    return _topic(known) == _topic(verdict) and precedence(known) <= precedence(verdict)
