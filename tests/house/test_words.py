"""What people read is said in the words of the field: those of the inside do not reach them.

Read are all literal sentences of the code, and of the scripts that build the native core, but for docstrings,
assertions, names of threads and what is logged for debugging: errors, log lines, what commands print, help texts.
Numbers of the inside are not put into them either.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.house.test_prose import SCRIPTS
from tests.house.test_rules import WRITTEN, name

INSIDE = re.compile(
    r"\b(arenas?|doorbells?|eventfds?|farewells?|group loops?|guests?|incarnations?|knock(s|ed|ing)?|lanes?(?!/)"
    r"|reception|seats?|strangers?|(its|Unix) door|contract chain|plan hash)\b",
    re.IGNORECASE,
)
NUMBERS = {"generation", "incarnation", "epoch"}  # of up to 19 digits, or made up: nobody can do anything with them
MAY_NUMBER = {
    "coordinator/core/membership.py",  # two coordinators, of which the later one is obeyed
    "launcher/collectived_launcher/status/tables.py",  # with --wide
    "worker/remote_ranks/sequencer.py",  # to who has sent that number itself, over gRPC alone
}


def _is_quiet(node: ast.AST) -> bool:
    """Whether nobody but a developer reads what stands below."""
    match node:
        case ast.Assert() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Call(func=ast.Attribute(attr="debug" | "Thread")):
            return True
        case ast.Call(func=ast.Name(id="Log"), args=[ast.Constant(value="debug"), *_]):
            return True
    return False


def _is_command(node: ast.FunctionDef) -> bool:
    """Its docstring is its help text."""
    return any("click." in ast.unparse(one) for one in node.decorator_list)


def sentences(tree: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """All literal texts that people may read."""
    for child in ast.iter_child_nodes(tree):
        if _is_quiet(child):
            continue
        if isinstance(child, ast.FunctionDef) and _is_command(child):
            yield ast.Constant(ast.get_docstring(child) or "", lineno=child.lineno)
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            yield child
        else:
            yield from sentences(child)


def _words(sentence: ast.Constant | ast.JoinedStr) -> str:
    """Its literal part."""
    parts = sentence.values if isinstance(sentence, ast.JoinedStr) else [sentence]
    return "…".join(str(part.value) for part in parts if isinstance(part, ast.Constant))


def numbers(source: str) -> Iterator[str]:
    """Numbers of the inside that sentences quote, each with its line."""
    for sentence in sentences(ast.parse(source)):
        for part in ast.walk(sentence) if " " in _words(sentence) else ():
            match part:
                case ast.FormattedValue(value=ast.Attribute(attr=quoted) | ast.Name(id=quoted)) if quoted in NUMBERS:
                    yield f"{part.lineno}: {{{quoted}}}"


def offences(source: str) -> Iterator[str]:
    """Words of the inside in what people read, each with its line."""
    for sentence in sentences(ast.parse(source)):
        text = _words(sentence)
        if " " in text and (found := INSIDE.search(text)):
            yield f"{sentence.lineno}: {found[0]}"


@pytest.mark.parametrize("path", [*WRITTEN, *SCRIPTS], ids=name)
def test_what_people_read_has_no_words_of_the_inside(path: Path) -> None:
    assert not list(offences(path.read_text()))


@pytest.mark.parametrize("path", [*WRITTEN, *SCRIPTS], ids=name)
def test_what_people_read_quotes_no_numbers_of_the_inside(path: Path) -> None:
    found = list(numbers(path.read_text()))
    assert bool(found) == any(name(path).endswith(other) for other in MAY_NUMBER), found


@pytest.mark.parametrize(
    "source",
    [
        'raise ValueError("its doorbell has gone")',
        'raise ValueError(f"lane {number} is closed")',
        'log.warning("a knock at %s", door)',
        'yield Log("info", f"the incarnation {it} has come")',
        '@click.command()\ndef f():\n    """Show the group loops that run."""',
        'click.echo("all seats are taken")',
        'why = "the reception is closed"',
    ],
)
def test_a_word_of_the_inside_is_seen(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize(
    "source",
    [
        'log.debug("its doorbell has gone")',
        'assert seat, "the seat is taken"',
        'def f():\n    """The lane of a group."""',
        'threading.Thread(name=f"group loop {it}")',
        'raise ValueError("expected letters and digits")',
        'KEY = "doorbell"',
    ],
)
def test_what_is_for_developers_is_not(source: str) -> None:
    assert not list(offences(source))


@pytest.mark.parametrize("source", ['raise E(f"of {frame.generation}")', 'log.info(f"epoch {epoch}")'])
def test_a_number_of_the_inside_is_seen(source: str) -> None:
    assert list(numbers(source))
