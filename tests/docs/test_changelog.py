"""CHANGELOG.md is what users read: short points under the headings of Keep a Changelog."""

from __future__ import annotations

import re

from tests.docs.contents import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text()
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
PARTS = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
MOST_LINES, MOST_POINT_LINES = 250, 4


def test_the_first_part_is_what_comes_next_and_others_are_releases() -> None:
    titles = [part.partition("\n")[0] for part in PARTS]
    assert titles[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\S*\] - \d{4}-\d\d-\d\d", title) for title in titles[1:])


def test_each_part_is_short_and_has_the_known_headings_in_their_order() -> None:
    for part in PARTS:
        headings = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert headings == [kind for kind in KINDS if kind in headings]
        assert len(part.splitlines()) <= MOST_LINES, (
            "say it in fewer words, or in a page of docs/ to which a point leads"
        )


def test_each_point_is_short() -> None:
    points = re.findall(r"^- .*\n(?:  .*\n)*", TEXT, re.MULTILINE)
    assert len(points) > 100
    assert not [point for point in points if point.count("\n") > MOST_POINT_LINES]
