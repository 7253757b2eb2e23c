"""Findings as lines for people, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from collectived_launcher.doctor.checks import PAIRWISE_CHECKS
from collectived_launcher.doctor.finding import Finding, Grade, worst_grade
from collectived_proto.report.phrases import sanitize_text

_COLOURS = {Grade.OK: "green", Grade.WARNING: "yellow", Grade.FAILURE: "red"}
_WIDTH = {"grade": 7, "check": 13}


def format_lines(findings: Sequence[Finding], several: bool = False) -> Iterator[str]:
    """One line per finding, and one per remedy; `several`: name each host, and sum up what is well on others."""
    for finding in _collapse_ok(findings) if several else findings:
        grade = click.style(f"{finding.grade.name:{_WIDTH['grade']}}", fg=_COLOURS[finding.grade])
        place = f"{finding.host or 'this host'}: " if several else ""
        yield f"{grade}  {finding.check:{_WIDTH['check']}}  {sanitize_text(place + finding.text)}"
        if finding.remedy:
            yield f"{'':{_WIDTH['grade']}}  {'':{_WIDTH['check']}}  → {sanitize_text(finding.remedy)}"


def _collapse_ok(findings: Sequence[Finding]) -> Iterator[Finding]:
    well = Counter(finding.host for finding in findings if _is_local(finding) and finding.grade is Grade.OK)
    for finding in findings:
        if not (_is_local(finding) and finding.host and finding.grade is Grade.OK):
            yield finding
        elif count := well.pop(finding.host, 0):
            yield Finding(f"{count} checks", Grade.OK, "well", host=finding.host)


def _is_local(finding: Finding) -> bool:
    return finding.check not in PAIRWISE_CHECKS


def summary(findings: Sequence[Finding]) -> str:
    """`17 OK, 1 warning, no failure`"""
    count = Counter(finding.grade for finding in findings)
    words = [f"{count[Grade.OK]} OK", _pluralize(count[Grade.WARNING], "warning")]
    return ", ".join([*words, _pluralize(count[Grade.FAILURE], "failure")])


def _pluralize(count: int, word: str) -> str:
    return f"{count or 'no'} {word}{'s' if count > 1 else ''}"


def build_document(findings: Sequence[Finding], facts: Any) -> dict[str, Any]:
    """For JSON: the worst grade, each finding, and what they were judged from."""
    return {
        "worst": worst_grade(findings).name,
        "findings": [{**asdict(finding), "grade": finding.grade.name} for finding in findings],
        "facts": {name: _to_plain(getattr(facts, name)) for name in facts.__slots__} if facts is not None else {},
    }


def _to_plain(part: Any) -> Any:
    if isinstance(part, tuple):
        return [_to_plain(entry) for entry in part]
    return asdict(part)


def parse_document(document: dict[str, Any], host: str) -> list[Finding]:
    """Parse the findings of another host from `document`.

    Raises:
        KeyError, TypeError, ValueError: it is no such document.
    """
    return [
        Finding(
            str(said["check"]), Grade[said["grade"]], str(said["text"]), str(said["remedy"]), str(said["host"] or host)
        )
        for said in document["findings"]
    ]
