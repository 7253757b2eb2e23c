"""How one worker comes to the verdict that all workers of its generation come to, as a pure step function.

Verdicts come from two sides: the coordinator sends one to every worker, and workers that hear nothing decide alone and
tell each other. The rule is one for both, whatever comes first:

- Who decides alone tells all the others, and so does everybody who hears better of it. Each then listens for
  `listen_seconds`, and takes the verdict with the lowest `precedence` that it has heard.
- What clients of some worker have been told goes before everything: it is said to be *final* to whoever says otherwise.
- A verdict of the coordinator is final at once where nobody has spoken, and in the first third of a listening. After
  that it comes too late: the others might not hear of it before they take theirs.

If a message takes no longer than a third of `listen_seconds`, all workers take the same verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from collectived_proto.types import Verdict

BY_COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class TellVerdict:
    """Tell it to all the other workers, or to worker `only`; `final`: clients have been told it."""

    verdict: Verdict
    final: bool = False
    only: int | None = None


@dataclass(frozen=True, slots=True)
class TakeVerdict:
    """It counts here from now on."""

    verdict: Verdict


AgreementEffect = TellVerdict | TakeVerdict


class VerdictAgreement:
    """The state of one worker in one generation. `alone`: the generation has no other worker."""

    def __init__(self, listen_seconds: float, alone: bool = False) -> None:
        self._listen_seconds = listen_seconds
        self._is_alone = alone
        self._taken: list[Verdict] = []  # faults
        self._best: Verdict | None = None
        self._departures: dict[tuple[int, ...], Verdict] = {}  # that ranks have left in order: one rules out no other
        self._pending_departures: list[Verdict] = []  # of these, what has not been taken
        self._late: list[Verdict] = []  # what came when it was too late to tell the others
        self._until = math.inf  # when listening ends
        self._accepts_until = math.inf

    @property
    def next_deadline(self) -> float:
        """When `on_timer` has something to do; inf where nobody has spoken."""
        return self._until

    def decide_alone(self, verdict: Verdict, now: float) -> list[AgreementEffect]:
        """This worker has heard nothing of the coordinator, and says what it would decide."""
        if self._is_alone:
            return self._take(verdict)
        if verdict.orderly:
            return self._propose_departure(verdict, now)
        if now > self._accepts_until:
            self._late.append(verdict)
            return []
        return self._propose(verdict, now)

    def hear_coordinator(self, verdict: Verdict, now: float) -> list[AgreementEffect]:
        if verdict.orderly or self._until == math.inf:
            return self._take(verdict)
        if now > self._accepts_until:
            self._late.append(verdict)
            return []
        return [TellVerdict(verdict, final=True), *self._take_final(verdict, now)]

    def hear_worker(self, task: int, verdict: Verdict, final: bool, now: float) -> list[AgreementEffect]:
        """What worker `task` has decided, or has been told."""
        if final:
            return [] if self._find_taken(verdict) else self._take_final(verdict, now)
        proposed = (self._propose_departure if verdict.orderly else self._propose)(verdict, now)
        return proposed or [TellVerdict(known, final=True, only=task) for known in self._taken if known != verdict]

    def on_timer(self, now: float) -> list[AgreementEffect]:
        return self._settle(now) if now >= self._until else []

    def _propose(self, verdict: Verdict, now: float) -> list[AgreementEffect]:
        if self._find_taken(verdict) or (self._best and precedence(verdict) >= precedence(self._best)):
            return []
        self._best = verdict
        return self._listen(verdict, now)

    def _propose_departure(self, verdict: Verdict, now: float) -> list[AgreementEffect]:
        """Of what is said about the same ranks the lowest counts, and of all of it the lowest comes first."""
        ranks = tuple(member.rank for member in verdict.missing)
        known = self._departures.get(ranks)
        if self._find_taken(verdict) or (known and precedence(verdict) >= precedence(known)):
            return []
        self._departures[ranks] = verdict
        self._pending_departures.append(verdict)
        return self._listen(verdict, now)

    def _listen(self, verdict: Verdict, now: float) -> list[AgreementEffect]:
        """Tells the others what is best; first what was taken before, which they may be about to take."""
        if self._until == math.inf:
            self._until = now + self._listen_seconds
            self._accepts_until = now + self._listen_seconds / 3
        return [*(TellVerdict(known, final=True) for known in self._taken), TellVerdict(verdict)]

    def _take_final(self, verdict: Verdict, now: float) -> list[AgreementEffect]:
        """Clients have been told it: what it leaves undecided is listened for on."""
        effects = self._take(verdict)
        if self._best is not None and self._find_taken(self._best):
            self._best = None
        undecided = self._best or self._pending_departures
        return effects if undecided else effects + self._settle(now)

    def _settle(self, now: float) -> list[AgreementEffect]:
        """Ends the listening with what was best."""
        self._until = self._accepts_until = math.inf
        said, late = [*self._pending_departures, *([self._best] if self._best else [])], self._late
        self._best, self._pending_departures, self._late = None, [], []
        effects: list[AgreementEffect] = []
        for one in sorted(said, key=precedence):  # faults and departures alike: of both the lowest comes first
            effects += self._take(one)
        for one in late:  # concerns what is left undecided, if anything is
            if one.decided_by == BY_COORDINATOR:
                effects += self.hear_coordinator(one, now)
            else:
                effects += self.decide_alone(one, now)
        return effects

    def _take(self, verdict: Verdict) -> list[AgreementEffect]:
        if verdict.decided_by != BY_COORDINATOR and self._find_taken(verdict):
            return []
        if not verdict.orderly:
            self._taken.append(verdict)
        return [TakeVerdict(verdict)]

    def _find_taken(self, verdict: Verdict) -> Verdict | None:
        """The fault that decides everything that this verdict is about, if one has been taken."""
        return next((known for known in self._taken if known.from_instance <= verdict.from_instance), None)


def precedence(verdict: Verdict) -> tuple[bool, int, int, str]:
    """Of several verdicts the one with the lowest of these counts."""
    culprits = (*verdict.missing, *verdict.differing)
    lowest = min((member.rank for member in culprits), default=1 << 32)
    return verdict.decided_by != BY_COORDINATOR, verdict.from_instance, lowest, verdict.decided_by
