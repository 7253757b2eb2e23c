"""Text that people read in source files: comments, docstrings and strings that are sentences."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence

Text = tuple[int, str]  # the line on which it starts, and its words on one line


def python_prose(source: str) -> Iterator[Text]:
    """Paragraphs of comments and docstrings, and strings of several words."""
    yield from _comments(source)
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in parts:
                yield from _paragraphs(node.lineno, text.splitlines())
            case ast.JoinedStr():
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                yield from _paragraphs(node.lineno, text.splitlines())


def c_prose(source: str) -> Iterator[Text]:
    """Paragraphs of comments, and string literals of several words."""
    for found in re.finditer(r'/\*.*?\*/|(?://[^\n]*\n\s*)+|"(?:\\.|[^"\\\n])*"', source, re.DOTALL):
        lines = [re.sub(r"^\s*(?:/?\*+/?|//)\s?|\s*\*/$", "", line).strip('"') for line in found[0].splitlines()]
        yield from _paragraphs(source.count("\n", 0, found.start()) + 1, lines)


def hash_prose(source: str) -> Iterator[Text]:
    """Paragraphs of comments behind `#`, in YAML, TOML, shell scripts, units and Dockerfiles."""
    found = [(row, re.match(r"(|.*?\s)#+(?:\s+(.*))?$", line)) for row, line in enumerate(source.splitlines(), 1)]
    comments = [((row, len(one[1])), one[2] or "", bool(one[1].strip())) for row, one in found if one]
    yield from _join_lines(comments)


def proto_prose(source: str) -> Iterator[Text]:
    """Paragraphs of comments; no string there is a sentence. What stands behind a field begins a text of its own."""
    found = [(row, re.match(r"(.*?)//\s?(.*)", line)) for row, line in enumerate(source.splitlines(), 1)]
    comments = [((row, len(one[1])), one[2], bool(one[1].strip())) for row, one in found if one]
    yield from _join_lines(comments)


def _comments(source: str) -> Iterator[Text]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from _join_lines(
        (one.start, one.string.lstrip("#: "), False) for one in tokens if one.type == tokenize.COMMENT
    )


def _join_lines(comments: Iterable[tuple[tuple[int, int], str, bool]]) -> Iterator[Text]:
    """Comments in successive lines, of the same indentation, are one text.

    Args:
        comments: of each, its line and column, its words, and whether it begins a text in any case.
    """
    block: list[str] = []
    begun, last = 0, (-1, -1)
    for place, text, is_first in comments:
        if is_first or place != (last[0] + 1, last[1]):
            yield from _paragraphs(begun, block)
            begun, block = place[0], []
        last = place
        block.append(text)
    yield from _paragraphs(begun, block)


def _paragraphs(begun: int, lines: Sequence[str]) -> Iterator[Text]:
    """Of one text: an empty line, or an item of a list, begins one."""
    paragraph: list[str] = []
    start = begun
    for number, line in enumerate([*lines, ""], begun):
        if not line.strip() or re.match(r"\s*(?:[-*]|\d+\.) ", line):
            if " " in (text := " ".join(" ".join(paragraph).split())):
                yield start, re.sub(r"``?[^`]*``?", "code", text)
            start, paragraph = number + (not line.strip()), []
        paragraph.append(line)
