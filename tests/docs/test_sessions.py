"""What is shown and does not come out, and what is typed and does not exist, is noticed."""

from __future__ import annotations

import click
import pytest
from tests.docs.command_lines import commands, read, read_ours
from tests.docs.sessions import differs, steps


@pytest.mark.parametrize(
    ("shown", "said", "wrong"),
    [
        ("a b", "a b", ""),
        ("a …", "a b c", ""),
        ("… c", "a b c", ""),
        ("a … c …", "a b c d", ""),
        ("a", "a b", "was said besides: ['b']"),
        ("a b", "a", "instead of 'b' was said []"),
        ("a c", "a b c", "instead of 'c' was said ['b']"),
        ("a … d", "a b c", "was not said: d"),
        ("… b a", "a b", "instead of 'a' was said []"),
    ],
)
def test_lines_are_those_that_were_said_but_for_an_ellipsis(shown: str, said: str, wrong: str) -> None:
    assert differs(shown.split(), said.split()) == wrong


def test_a_session_is_commands_and_what_they_print() -> None:
    assert steps("$ a \\\n  b\n1\n2\n$ c\n") == [("a   b", ["1", "2"]), ("c", [])]
    with pytest.raises(AssertionError, match="begins with a command"):
        steps("1\n$ c\n")


def test_a_line_has_simple_commands() -> None:
    assert list(commands("A=1 a -x 'b c' > out && (b | c < in) & # d")) == [["a", "-x", "b c"], ["b"], ["c"]]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("collectived status --no-such", click.NoSuchOption),
        ("collectived launch --workers two -- true", click.BadParameter),
        ("collectived up", click.MissingParameter),
        ("collectived stat", AssertionError),
        ("collectived worker --no-such", SystemExit),
        ("collectived simulate --workers 0", SystemExit),
        ("python -m benchmarks.compare --no-such", SystemExit),
        ("make no-such", AssertionError),
        ("pip install 'collectived[no-such]'", AssertionError),
        ("no-such", KeyError),
    ],
)
def test_what_a_program_does_not_take_is_noticed(
    line: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    (words,) = commands(line)
    with pytest.raises(error):
        read(words, monkeypatch)
    if words[0] == "collectived":
        with pytest.raises(error):
            read_ours(words[1:])
