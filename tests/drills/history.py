"""The history of a group as its ranks lived it, and what must hold of every history. Pure: events in, violations out.

Times are seconds of the machine's monotonic clock, which all processes of one host share. A submission is noted before
the call is made, an outcome after it has returned, so a deadline is never later here than it was for the product.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from collectived_proto.errors import Code

AT_ONCE_SECONDS = 1.0  # within which a call on a generation that this rank knows to be over must fail


@dataclass(frozen=True, slots=True)
class Submit:
    """A rank calls a collective. `timeout` in seconds, 0: none. `value`: every element of its vector; None: not summed.

    `waits`: its success means that every rank has submitted; a rank that only sends does not wait. `lazy`: the caller
    looks for the outcome when it pleases, so that when it was found says nothing.
    """

    who: str
    rank: int
    size: int
    generation: int
    instance: int
    at: float
    timeout: float = 0.0
    value: float | None = None
    waits: bool = True
    lazy: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The call has returned, or raised. `value`: every element of the sum; NaN where they are not all the same."""

    who: str
    rank: int
    generation: int
    instance: int
    at: float
    code: Code
    value: float | None = None
    missing: tuple[int, ...] = ()
    differing: tuple[int, ...] = ()
    decided_by: str = ""
    text: str = ""

    @property
    def verdict(self) -> str:
        """What all ranks that fail must have been told alike."""
        named = [f"missing {list(self.missing)}"] * bool(self.missing)
        named += [f"differing {list(self.differing)}"] * bool(self.differing)
        return " ".join([self.code.name, *named])


@dataclass(frozen=True, slots=True)
class Gone:
    """A process was killed, or stopped for good: it owes no outcomes."""

    who: str


Event = Submit | Outcome | Gone
_Call = tuple[int, int, int]  # generation, instance, rank
_Instance = tuple[int, int]  # generation, instance


def check(events: Iterable[Event], allowance: float, orphans: Collection[int] = ()) -> list[str]:
    """What is wrong with the history of one group, as sentences; none where nothing is.

    Args:
        allowance: seconds after its deadline within which an instance must have ended everywhere.
        orphans: ranks whose own worker was hit: where it cannot tell them anything they may decide alone, with the code
            of the others but without knowing the culprits.
    """
    return list(_check(list(events), allowance, orphans))


def _check(events: list[Event], allowance: float, orphans: Collection[int]) -> Iterator[str]:
    submits: dict[_Call, Submit] = {}
    outcomes: dict[_Call, Outcome] = {}
    gone = {event.who for event in events if isinstance(event, Gone)}
    for event in events:
        if isinstance(event, Gone):
            continue
        call = (event.generation, event.instance, event.rank)
        if isinstance(event, Submit):
            if call in submits:
                yield f"{_name(call)} was submitted twice"
            submits[call] = event
        else:
            if call in outcomes:
                yield f"{_name(call)} has two outcomes: {outcomes[call].verdict} and {event.verdict}"
            outcomes[call] = event
    yield from _one_outcome_each(submits, outcomes, gone)
    yield from _numbered_in_order(submits)
    yield from _right_values(submits, outcomes)
    yield from _one_verdict(outcomes, orphans)
    yield from _failed_for_good(submits, outcomes)
    yield from _in_time(submits, outcomes, allowance)


def _one_outcome_each(
    submits: Mapping[_Call, Submit], outcomes: Mapping[_Call, Outcome], gone: Collection[str]
) -> Iterator[str]:
    for call, submit in submits.items():
        if call not in outcomes and submit.who not in gone:
            yield f"{_name(call)} has no outcome: it hangs"
    for call, outcome in outcomes.items():
        if call not in submits:
            yield f"{_name(call)} has an outcome and was never submitted"
        elif outcome.at < submits[call].at:
            yield f"{_name(call)} ended before it was submitted"


def _numbered_in_order(submits: Mapping[_Call, Submit]) -> Iterator[str]:
    numbers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for generation, instance, rank in submits:
        numbers[generation, rank].append(instance)
    for (generation, rank), found in numbers.items():
        if sorted(found) != list(range(len(found))):
            yield f"rank {rank} in generation {generation} submitted instances {_short(sorted(found))}"


def _right_values(submits: Mapping[_Call, Submit], outcomes: Mapping[_Call, Outcome]) -> Iterator[str]:
    together: dict[_Instance, dict[int, Submit]] = defaultdict(dict)
    for (generation, instance, rank), submit in submits.items():
        together[generation, instance][rank] = submit
    for call, outcome in outcomes.items():
        if outcome.code is not Code.OK or call not in submits or not submits[call].waits:
            continue
        everybody = together[call[:2]]
        absent = [rank for rank in range(submits[call].size) if rank not in everybody]
        if absent:
            yield f"{_name(call)} succeeded although ranks {absent} never submitted it"
        elif outcome.value is not None:
            wanted = math.fsum(submit.value or 0.0 for submit in everybody.values())
            if outcome.value != wanted:
                yield f"{_name(call)} is wrong: {outcome.value} instead of {wanted}"


def _one_verdict(outcomes: Mapping[_Call, Outcome], orphans: Collection[int]) -> Iterator[str]:
    """One code and one set of culprits among all that fail in a generation."""
    told: dict[int, dict[str, list[_Call]]] = defaultdict(lambda: defaultdict(list))
    for call, outcome in outcomes.items():
        if outcome.code is Code.OK:
            continue
        alone = outcome.rank in orphans and outcome.decided_by != "coordinator"
        if not alone:
            told[call[0]][outcome.verdict].append(call)
        elif not any(outcome.code is other.code for other in _others(outcomes, call[0], orphans)):
            told[call[0]][f"{outcome.verdict} (alone)"].append(call)
    for generation, verdicts in told.items():
        if len(verdicts) > 1:
            sides = "; ".join(f"{verdict} on {_places(calls)}" for verdict, calls in verdicts.items())
            yield f"generation {generation} failed in different ways: {sides}"


def _others(outcomes: Mapping[_Call, Outcome], generation: int, orphans: Collection[int]) -> Iterator[Outcome]:
    """Failures of ranks that were told; where there are none, orphans have nobody to agree with but each other."""
    failed = [o for call, o in outcomes.items() if call[0] == generation and o.code is not Code.OK]
    told = [outcome for outcome in failed if outcome.rank not in orphans]
    yield from told or failed


def _failed_for_good(submits: Mapping[_Call, Submit], outcomes: Mapping[_Call, Outcome]) -> Iterator[str]:
    """After an instance that failed nothing of its generation succeeds, and who knows it hears so at once."""
    first: dict[int, int] = {}
    for (generation, instance, _), outcome in outcomes.items():
        if outcome.code is not Code.OK:
            first[generation] = min(instance, first.get(generation, instance))
    failed_at: dict[tuple[int, int], float] = {}  # generation, rank -> when it first heard
    for (generation, _, rank), outcome in outcomes.items():
        if outcome.code is not Code.OK:
            failed_at[generation, rank] = min(outcome.at, failed_at.get((generation, rank), math.inf))
    for call, outcome in outcomes.items():
        generation, instance, rank = call
        if outcome.code is Code.OK:
            waits = call not in submits or submits[call].waits
            if waits and instance > first.get(generation, instance):
                yield f"{_name(call)} succeeded after instance {first[generation]} had failed"
            continue
        known = failed_at[generation, rank]
        if call in submits and submits[call].at >= known and outcome.at - submits[call].at > AT_ONCE_SECONDS:
            took = outcome.at - submits[call].at
            yield f"{_name(call)} took {took:.2f} s to fail although its generation was known to be over"


def _in_time(submits: Mapping[_Call, Submit], outcomes: Mapping[_Call, Outcome], allowance: float) -> Iterator[str]:
    deadlines: dict[_Instance, float] = defaultdict(lambda: math.inf)
    for call, submit in submits.items():
        if submit.timeout:
            deadlines[call[:2]] = min(deadlines[call[:2]], submit.at + submit.timeout)
    for call, outcome in outcomes.items():
        if call not in submits or submits[call].lazy:
            continue
        due = max(deadlines[call[:2]], submits[call].at)
        if outcome.at > due + allowance:
            late = outcome.at - due
            told = outcome.verdict
            yield f"{_name(call)} ended {late:.3f} s after its deadline, more than {allowance:.3f} s ({told})"


def _name(call: _Call) -> str:
    generation, instance, rank = call
    return f"instance {instance} of generation {generation} on rank {rank}"


def _places(calls: Iterable[_Call]) -> str:
    return ", ".join(f"rank {rank} #{instance}" for _, instance, rank in sorted(calls, key=lambda c: (c[2], c[1])))


def _short(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{numbers[0]}, … {len(numbers)} of them … {numbers[-1]}]"
