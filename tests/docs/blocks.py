"""The blocks of README.md and docs/. Each has an owner, a test, which stands behind the language of its fence:

    ```console run by tests/docs/test_laptop.py
    ```toml checked by tests/docs/test_security_page.py
    ```python run

The test gets its blocks by `claimed(__file__)`: whoever adds a block to a page gives it to a test, which takes it or
fails. `run` alone is short for tests/docs/test_snippets.py. A block is run if what stands there is executed, or is what
came out; it is checked if a parser or the code itself has a say on it. Blocks of generated pages have no such words:
tests compare those pages with the code (GENERATED). `tests/house/test_blocks.py` holds all of this together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SNIPPETS = "tests/docs/test_snippets.py"
# Pages that `make docs` writes, with the test that compares them; the first pattern that fits decides.
GENERATED = {
    "docs/reference/cli.md": "tests/docs/test_cli_page.py",
    "docs/reference/configuration.md": "",
    "docs/reference/messages.md": "",
    "docs/reference/status.md": "",
    "docs/reference/*.md": "tests/docs/test_reference.py",
}
EXAMPLES = "tests/docs/test_examples.py"  # which runs what stands below "Example" on those pages
_BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WORDS = re.compile(r"(?P<language>\w*)(?: (?P<how>run|checked)(?: by (?P<owner>tests/\S+\.py))?)?")


class Block(NamedTuple):
    page: str  # docs/start/laptop.md
    line: int  # of its fence
    section: str  # the heading above it
    language: str
    how: str  # "run", "checked", "generated", or "" where nobody says so
    owner: str  # tests/docs/test_laptop.py, or ""
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]


def blocks_of(path: Path) -> Iterator[Block]:
    text, page = path.read_text(), str(path.relative_to(ROOT))
    generated = next((test for pattern, test in GENERATED.items() if fnmatch(page, pattern)), "")
    for found in _BLOCK.finditer(text):
        before = text[: found.start()]
        prose = _BLOCK.sub("", before)
        section = (re.findall(r"^#+ (.*)$", prose, re.MULTILINE) or [""])[-1]
        words = _WORDS.fullmatch(found[1])
        assert words, f"{page}: {found[1]!r} is not LANGUAGE [run|checked [by tests/FILE.py]]"
        how, owner = words["how"] or "", words["owner"] or ""
        if how and not owner:
            owner = SNIPPETS
        elif generated and not how:
            how, owner = "generated", EXAMPLES if section == "Example" else generated
        yield Block(page, before.count("\n") + 1, section, words["language"], how, owner, found[2])


def all_blocks() -> list[Block]:
    return [block for path in PAGES for block in blocks_of(path)]


def claimed(file: str, page: str = "") -> list[Block]:
    """The blocks that name this test file as their owner, in their order; of one page, or of all.

    Args:
        file: `__file__` of the test.
        page: such as docs/start/laptop.md.
    """
    owner = str(Path(file).resolve().relative_to(ROOT))
    paths = (ROOT / page,) if page else PAGES
    found = [block for path in paths for block in blocks_of(path) if block.owner == owner and block.how != "generated"]
    assert found, f"no block of {page or 'the pages'} says that it belongs to {owner}"
    return found


def of_language(blocks: list[Block], *languages: str) -> list[str]:
    """The texts of those in these languages."""
    return [block.text for block in blocks if block.language in languages]


def taken_from(page: str, first_line: str) -> str:
    """The text of the block that begins so, for a test that compares something with it but is not its owner."""
    (text,) = [block.text for block in blocks_of(ROOT / page) if block.first_line == first_line]
    return text
