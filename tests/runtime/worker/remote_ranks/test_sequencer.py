"""Which number is next, in generations that a rank knows."""

from __future__ import annotations

import asyncio

import pytest

from collectived_proto.errors import FailedPreconditionError
from collectived_proto.ipc import messages
from collectived_runtime.worker.remote_ranks.sequencer import Sequencer

MANY = 200  # generations, more than are remembered


def make() -> Sequencer:
    return Sequencer("world", 1, lambda _: None, lambda _: None, lambda _: False)


def test_the_generation_of_a_rank_is_known_however_many_have_followed_it() -> None:
    sequencer = make()
    for successor in range(2, MANY):
        sequencer.add_generation(successor, 5)
    assert sequencer.next_number(0, False) == (1, 0)
    assert asyncio.run(sequencer.wait_turn(None, 0, True)) == (1, messages.P2P_BASE)
    sequencer.current_generation = MANY - 1
    assert sequencer.next_number(0, False) == (MANY - 1, 5)


@pytest.mark.parametrize("ask", ["reserve", "wait", "next"])
def test_a_generation_that_is_not_remembered_is_refused(ask: str) -> None:
    """One may be forgotten between the beginning of a stream and its turn."""
    sequencer = make()
    for successor in range(2, MANY):
        sequencer.add_generation(successor, 0)
    with pytest.raises(FailedPreconditionError, match="generation 2 of group 'world' is not known to this rank"):
        if ask == "reserve":
            with sequencer.reserve_number(2, 0, False):
                pass
        elif ask == "wait":
            asyncio.run(sequencer.wait_turn((2, 0), 2, False))
        else:
            sequencer.next_number(2, False)
