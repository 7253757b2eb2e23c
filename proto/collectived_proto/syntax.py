"""Expressions of Python as trees, in any thread."""

from __future__ import annotations

import ast

_TRIES = 10


def parse_expression(text: str) -> ast.Expression:
    """Parse one expression, of which nothing is evaluated.

    CPython 3.11 counts the depth of a tree that it builds for all threads together (gh-106905). If one thread builds a
    tree while garbage is collected amid that of another, a SystemError comes of it, though nothing is wrong. So it is
    tried again.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as `ast.parse`.
    """
    for _ in range(_TRIES - 1):
        try:
            return ast.parse(text, mode="eval")
        except SystemError:
            continue
    return ast.parse(text, mode="eval")
