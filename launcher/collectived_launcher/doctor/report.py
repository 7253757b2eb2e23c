"""Findings as lines for people, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from collectived_launcher.doctor.checks import MEASURED
from collectived_launcher.doctor.finding import Finding, Grade, worst
from collectived_proto.wording import clean

_COLOURS = {Grade.OK: "green", Grade.WARNING: "yellow", Grade.FAILURE: "red"}
_WIDTH = {"grade": 7, "check": 13}


def lines(findings: Sequence[Finding], several: bool = False) -> Iterator[str]:
    """One per finding, and one per remedy below it.

    Args:
        several: they are of more than one host; each is named, and what is well on another is one line.
    """
    for finding in _folded(findings) if several else findings:
        grade = click.style(f"{finding.grade.name:{_WIDTH['grade']}}", fg=_COLOURS[finding.grade])
        place = f"{finding.host or 'this host'}: " if several else ""
        yield f"{grade}  {finding.check:{_WIDTH['check']}}  {clean(place + finding.text)}"
        if finding.remedy:
            yield f"{'':{_WIDTH['grade']}}  {'':{_WIDTH['check']}}  → {clean(finding.remedy)}"


def _folded(findings: Sequence[Finding]) -> Iterator[Finding]:
    well = Counter(finding.host for finding in findings if _is_local(finding) and finding.grade is Grade.OK)
    for finding in findings:
        if not (_is_local(finding) and finding.host and finding.grade is Grade.OK):
            yield finding
        elif count := well.pop(finding.host, 0):
            yield Finding(f"{count} checks", Grade.OK, "well", host=finding.host)


def _is_local(finding: Finding) -> bool:
    return finding.check not in MEASURED


def summary(findings: Sequence[Finding]) -> str:
    """`17 OK, 1 warning, no failure`"""
    count = Counter(finding.grade for finding in findings)
    words = [f"{count[Grade.OK]} OK", _counted(count[Grade.WARNING], "warning")]
    return ", ".join([*words, _counted(count[Grade.FAILURE], "failure")])


def _counted(count: int, word: str) -> str:
    return f"{count or 'no'} {word}{'s' if count > 1 else ''}"


def document(findings: Sequence[Finding], facts: Any) -> dict[str, Any]:
    """For JSON: the worst grade, each finding, and what they were judged from."""
    return {
        "worst": worst(findings).name,
        "findings": [{**asdict(finding), "grade": finding.grade.name} for finding in findings],
        "facts": {name: _plain(getattr(facts, name)) for name in facts.__slots__} if facts is not None else {},
    }


def _plain(part: Any) -> Any:
    if isinstance(part, tuple):
        return [_plain(entry) for entry in part]
    return asdict(part)


def read(document: dict[str, Any], host: str) -> list[Finding]:
    """Findings that another host has told, from `document`.

    Raises:
        KeyError, TypeError, ValueError: it is no such document.
    """
    return [
        Finding(
            str(said["check"]), Grade[said["grade"]], str(said["text"]), str(said["remedy"]), str(said["host"] or host)
        )
        for said in document["findings"]
    ]
