"""The judgement of doctor about one thing: a grade, a sentence, and what to do where it is not well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Grade(IntEnum):
    """How well it is; the larger, the worse. Only a failure keeps a job from running."""

    OK = 0
    WARNING = 1
    FAILURE = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` is a name of `checks.CHECKS`; `host`: where it was found, '' for this host."""

    check: str
    grade: Grade
    text: str
    remedy: str = ""
    host: str = ""

    def __post_init__(self) -> None:
        if (self.grade is Grade.OK) is bool(self.remedy):
            raise ValueError(f"a remedy belongs to a warning or a failure, and to each: {self.check}: {self.text}")


def ok(check: str, text: str) -> Finding:
    return Finding(check, Grade.OK, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Grade.WARNING, text, remedy)


def failure(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Grade.FAILURE, text, remedy)


def worst_grade(findings: Iterable[Finding]) -> Grade:
    return max((finding.grade for finding in findings), default=Grade.OK)
