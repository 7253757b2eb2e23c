"""Sessions of a shell as pages show them: commands behind `$`, what they print below, `…` for any lines."""

from __future__ import annotations

import re

ELLIPSIS = "…"


def steps(session: str) -> list[tuple[str, list[str]]]:
    """(command, the lines that are shown below it), in order."""
    found = re.split(r"^\$ ", session.replace("\\\n", ""), flags=re.MULTILINE)
    assert not found[0].strip(), "a session begins with a command"
    return [(command, shown) for command, *shown in map(str.splitlines, found[1:])]


def differs(shown: list[str], said: list[str]) -> str:
    """What is wrong with the lines that a page shows, beside what was said; "" if they are these, but for `…`."""
    at, skipping = 0, False
    for line in shown:
        if line == ELLIPSIS:
            skipping = True
        elif skipping:
            if line not in said[at:]:
                return f"was not said: {line}"
            at, skipping = said.index(line, at) + 1, False
        elif said[at : at + 1] == [line]:
            at += 1
        else:
            return f"instead of {line!r} was said {said[at : at + 1]}"
    return "" if skipping or at == len(said) else f"was said besides: {said[at:]}"
