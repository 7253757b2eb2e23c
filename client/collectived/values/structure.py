"""From the canonical text of a nest back to its spec: for values that are taken as they come.

The text was written by another rank, so nothing in it is evaluated: keys of dicts must be literals of Python, and a
namedtuple comes back as one of the same name and fields. Subclasses of list and dict come back as list and dict.
"""

from __future__ import annotations

import ast
import re
from collections import namedtuple
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from collectived.values.nest import LEAF, NONE, Node, Spec
from collectived.values.sparse import SLICES
from collectived_proto.syntax import parse_expression

_MAX_DEPTH = 100  # containers in containers; a limit, for each costs stack
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<mark>[*{}\[\](),:=])
      | (?P<literal>[bB]?'(?:[^'\\]|\\.)*' | [bB]?"(?:[^"\\]|\\.)*"
          | -?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)? | (?:None|True|False)\b)
      | (?P<name>[^\W\d]\w*)
    )""",
    re.VERBOSE | re.DOTALL,
)


@lru_cache(maxsize=64)
def parse(text: str) -> Spec:
    """The spec whose `nest.structure` is `text`; dicts by sorted key.

    Raises:
        ValueError: it is none, it is nested too deeply, or a key is no literal and so cannot be read from its text.
    """
    reader = _Reader(text)
    try:
        spec = reader.value(0)
    except RecursionError:
        raise ValueError("a structure that is nested too deeply for the stack that is left") from None
    reader.expect_end()
    return spec


@lru_cache(maxsize=256)
def _named(name: str, fields: tuple[str, ...]) -> type[Any]:
    if name == SLICES.__name__ and fields == SLICES._fields:
        return SLICES
    return namedtuple(name, fields)  # which checks the names


class _Reader:
    """Recursive descent over tokens."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._kind = ""  # of the token that comes next: mark, literal, name; "" at the end
        self._token = ""
        self._advance()

    def value(self, depth: int) -> Spec:
        if depth > _MAX_DEPTH:
            raise ValueError(f"a structure nested more than {_MAX_DEPTH} deep")
        kind, token = self._next_token()
        if kind == "mark":
            if token == LEAF:
                return LEAF
            if token == "{":
                return self._dict(depth)
            if token == "[":
                return Node(list, tuple(self._several("]", lambda: self.value(depth + 1))))
            if token == "(":
                return Node(tuple, tuple(self._several(")", lambda: self.value(depth + 1))))
        elif token == NONE:
            return NONE
        elif kind == "name" and self._token == "(":
            return self._namedtuple(token, depth)
        raise self._error(f"{token!r}")

    def expect_end(self) -> None:
        if self._kind:
            raise self._error(f"{self._token!r} after its end")

    def _dict(self, depth: int) -> Node:
        items = self._several("}", lambda: (self._key(depth), self._read_after(":", depth)))
        keys = tuple(key for key, _ in items)
        return Node(dict, tuple(child for _, child in items), keys, keys, tuple(map(type, keys)))

    def _namedtuple(self, name: str, depth: int) -> Node:
        self._expect("(")
        items = self._several(")", lambda: (self._next_token()[1], self._read_after("=", depth)))
        return Node(_named(name, tuple(field for field, _ in items)), tuple(child for _, child in items))

    def _read_after(self, mark: str, depth: int) -> Spec:
        self._expect(mark)
        return self.value(depth + 1)

    def _key(self, depth: int) -> Any:
        kind, token = self._next_token()
        if kind == "literal":
            try:
                return ast.literal_eval(parse_expression(token))
            except (ValueError, SyntaxError):  # an escape that is none
                raise self._error(f"the key {token}") from None
        if token == "(" and depth < _MAX_DEPTH:
            return tuple(self._several(")", lambda: self._key(depth + 1)))
        raise self._error(f"the key {token!r}, which is no literal of Python")

    def _several(self, closing: str, one: Callable[[], Any]) -> list[Any]:
        found = []
        while self._token != closing:
            found.append(one())
            if self._token != closing:
                self._expect(",")
        self._advance()
        return found

    def _expect(self, mark: str) -> None:
        kind, token = self._next_token()
        if kind != "mark" or token != mark:
            raise self._error(f"{token!r} where {mark!r} was expected")

    def _next_token(self) -> tuple[str, str]:
        taken = self._kind, self._token
        self._advance()
        return taken

    def _advance(self) -> None:
        found = _TOKEN.match(self._text, self._at)
        if found is not None:
            self._kind, self._token, self._at = str(found.lastgroup), found[found.lastgroup or 0], found.end()
        elif self._text[self._at :].strip():
            raise self._error(f"{self._text[self._at : self._at + 20]!r}")
        else:
            self._kind = self._token = ""

    def _error(self, what: str) -> ValueError:
        shown = self._text if len(self._text) <= 200 else f"{self._text[:200]}…"
        return ValueError(f"the structure {shown} cannot be rebuilt: it has {what}")
