"""The short form of the fuzzing: no parser raises what it does not say, whatever strangers send."""

from __future__ import annotations

import pytest
from tests.fuzz.feeding import fuzz
from tests.fuzz.mutations import inputs
from tests.fuzz.parsers import PARSERS, Parser

COUNT = 1500


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: str(parser.name))
def test_hostile_input_is_read_or_refused(parser: Parser) -> None:
    fed = fuzz(parser, COUNT, seed=1)
    assert fed.defects == () and fed.inputs == COUNT
    assert fed.taken and fed.refused


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: str(parser.name))
def test_what_should_be_sent_is_read(parser: Parser) -> None:
    for seed in parser.seeds:
        parser.read(seed)


def test_inputs_can_be_made_again() -> None:
    assert list(inputs((b"abc", b"defg"), 50, 7)) == list(inputs((b"abc", b"defg"), 50, 7))
    assert list(inputs((b"abc", b"defg"), 50, 7)) != list(inputs((b"abc", b"defg"), 50, 8))
