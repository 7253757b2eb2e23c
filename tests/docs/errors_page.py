"""The table of docs/guide/errors.md: `python -m tests.docs.configuration` (`make docs`) writes it.

What becomes of the group and what to do next are the words of the page that the coordinator serves.
"""

from __future__ import annotations

import re

from tests.docs.contents import ROOT

from collectived_runtime.coordinator.web.errors_page import WHAT_NEXT

PAGE = ROOT / "docs" / "guide" / "errors.md"
_PART = re.compile(r"(<!-- made: errors -->\n).*?(<!-- end -->)", re.DOTALL)
_LINKS = {  # what the words of the other page lead to here, once each
    "`rejoin`, or end": "[`rejoin`](recovery.md), or end",
    "(a rule may": "(a [rule](../operate/security.md#rules-for-groups-and-devices) may",
}


def fresh(text: str) -> str:
    """The page with its table as the errors are now."""
    return _PART.sub(lambda found: f"{found[1]}{_table()}{found[2]}", text)


def _table() -> str:
    lines = ["| error | the group | next |", "|---|---|---|"]
    for kind, (group, following) in WHAT_NEXT.items():
        for plain, linked in _LINKS.items():
            following = following.replace(plain, linked)
        name = f"[`{kind.__name__}`](../reference/messages.md#{kind.__name__.lower()})"
        lines.append(f"| {name} | {group} | {following} |")
    return "".join(f"{line}\n" for line in lines)
