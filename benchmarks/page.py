"""docs/internals/performance.md: what commands put between its marks."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "performance.md"


def write(name: str, text: str, page: Path = PAGE) -> None:
    """Replaces what lies between the marks of that name.

    Raises:
        ValueError: the page has no such marks.
    """
    page.write_text(between(page.read_text(), name, text))


def between(page: str, name: str, text: str) -> str:
    """The page with `text` between its marks `<!-- NAME -->` and `<!-- end of NAME -->`. Pure."""
    marked = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end of {re.escape(name)} -->)", re.DOTALL)
    fresh, found = marked.subn(lambda marks: f"{marks[1]}\n{text.strip()}\n\n{marks[2]}", page)
    if found != 1:
        raise ValueError(f"the page has {found} places marked <!-- {name} -->: expected one")
    return fresh
