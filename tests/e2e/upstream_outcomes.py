"""How tests of other projects ended, as one line each: what runs them prints it, what asked for them reads it."""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """How one test ended: `how` is pass, skip or fail."""

    how: str
    name: str
    why: str


def read_outcomes(text: str) -> list[Outcome]:
    """What a `PrintedResult` has printed."""
    return [Outcome(*line.split("\t")) for line in text.splitlines() if line.count("\t") == 2]


def failures(outcomes: Sequence[Outcome]) -> dict[str, str]:
    return {outcome.name: outcome.why for outcome in outcomes if outcome.how == "fail"}


def passes(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.how == "pass" for outcome in outcomes)


class PrintedResult(unittest.TestResult):
    """Prints a line per test."""

    def name(self, test: Any) -> str:
        """What the line calls a test."""
        return str(test._testMethodName)

    def tell(self, how: str, test: Any, why: str = "") -> None:
        said = [line.strip() for line in why.splitlines() if line.strip()]
        print(how, self.name(test), " | ".join(said[-6:])[-900:].replace("\t", " "), sep="\t", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.tell("pass", test)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.tell("skip", test, reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.tell("fail", test, self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure
