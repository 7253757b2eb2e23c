"""Signatures and docstrings taken apart, for the pages of the reference."""

from __future__ import annotations

import enum
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.docs.contents import UNSAID

_ERROR = r"(?:[A-Z]\w+Error|Exception)"


@dataclass(frozen=True)
class Docstring:
    """A docstring taken apart: paragraphs before its sections, and their entries by name."""

    description: list[str]
    sections: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, thing: Any) -> Docstring:
        return cls.parse(inspect.cleandoc(thing.__doc__ or ""))

    @classmethod
    def parse(cls, text: str) -> Docstring:
        head, *rest = re.split(r"^(Args|Attributes|Returns|Raises):\n", text, flags=re.MULTILINE)
        sections: dict[str, dict[str, str]] = {}
        for title, body in zip(rest[::2], rest[1::2], strict=True):
            body, _, more = textwrap.dedent(body).partition("\n\n")
            head += f"\n\n{more}" if more else ""
            sections[title] = {"": joined(body)} if title == "Returns" else dict(entries(body, title))
        return cls([block for block in head.strip("\n").split("\n\n") if block.strip()], sections)


def entries(body: str, title: str) -> Iterator[tuple[str, str]]:
    """(names, text) of a section; one line may hold several entries, as in `name: as joined. key: its number.`"""
    one = rf"(?:{_ERROR}(?:, {_ERROR})*)" if title == "Raises" else r"(?:[a-z_]\w*(?:, [a-z_]\w*)*)"
    for entry in re.split(r"\n(?! )", body.strip("\n")):
        parts = re.split(rf"(?:^|(?<=\. ))({one}): ", joined(entry))
        assert not parts[0], f"not an entry of {title}: {entry!r}"
        yield from zip(parts[1::2], (text.strip() for text in parts[2::2]), strict=True)


def joined(text: str) -> str:
    return " ".join(text.split())


@dataclass(frozen=True)
class Function:
    name: str
    parameters: list[str]
    arguments: list[str]
    returns: str
    doc: Docstring

    @classmethod
    def of(cls, function: Callable[..., Any], doc: Docstring | None = None) -> Function:
        shown = inspect.signature(function)
        given = {name: one for name, one in shown.parameters.items() if name != "self"}
        returns = "" if isinstance(function, type) else f" -> {annotation(shown.return_annotation)}"
        return cls(function.__qualname__, list(written(given)), list(given), returns, doc or Docstring.of(function))

    def signature(self, called: str) -> str:
        line = f"{called}({', '.join(self.parameters)}){self.returns}"
        if len(line) > 100:
            line = f"{called}(\n{''.join(f'    {part},{chr(10)}' for part in self.parameters)}){self.returns}"
        return f"```python\n{line}\n```"

    @property
    def said(self) -> dict[str, str]:
        """What is said about arguments."""
        return {**self.doc.sections.get("Args", {}), **UNSAID.get(self.name, {})}

    @property
    def unsaid(self) -> list[str]:
        """Arguments about which nothing is said, neither in a list nor in the text."""
        text = " ".join([*self.doc.description, *self.said, *self.said.values()])
        return [name for name in self.arguments if not re.search(rf"\b{name}\b", text)]

    def sections(self, level: str = "##") -> list[str]:
        """Arguments, results and errors."""
        found = {
            "Arguments": bullets(self.said),
            "Result": self.doc.sections.get("Returns", {}).get("", ""),
            "Errors": bullets(self.doc.sections.get("Raises", {})),
        }
        return [part for title, text in found.items() if text for part in (f"{level} {title}", text)]


def written(parameters: dict[str, inspect.Parameter]) -> Iterator[str]:
    keyword_only = False
    for name, one in parameters.items():
        if one.kind is one.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            yield "*"
        default = "" if one.default is one.empty else f" = {literal(one.default)}"
        yield f"{name}: {annotation(one.annotation)}{default}"


def annotation(given: Any) -> str:
    return given if isinstance(given, str) else str(getattr(given, "__name__", given))


def literal(value: Any) -> str:
    shown = f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)
    return shown.replace("'", '"')


def bullets(found: dict[str, str]) -> str:
    marked = {", ".join(f"`{name}`" for name in names.split(", ")): text for names, text in found.items()}
    return "\n".join(f"- {names}: {text}" if text else f"- {names}" for names, text in marked.items())
