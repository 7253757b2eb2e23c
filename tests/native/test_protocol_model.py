"""The protocol of the native core, in a model of its threads and of two memories, and what that model would notice."""

from __future__ import annotations

import pytest
from tests.native.letters_model import search_letters
from tests.native.misfortunes import MISFORTUNES, list_places, search, strike_at

SEED = 1
PLANTED = {  # precaution that is left out -> when it is missed
    "no fence": ("none",),
    "no second look": ("none",),
    "no compare-and-swap": ("stop",),
    "silent verdict": ("abort", "differ"),
    "no help": ("kill",),
    "no bells": ("kill",),
    "two parts": ("none",),
    "published before it is put": ("none",),
    "announced late": ("differ",),
    "late dispute": ("differ and absent",),
    "limit ignored": ("kill",),
    "late alone": ("withdraw",),
    "waiting forgotten": ("abort",),
    "decided read late": ("none",),
    "silent resignation": ("none",),
    "resumed unheard": ("none",),
    "no gate": ("none",),
}
PLANTED_IN_LETTERS = (
    "no mail",
    "letter shown first",
    "filled before it is there",
    "slot reused early",
    "taken before it is read",
    "cancelled without a look",
    "one look",
    "others overlooked",
)


@pytest.mark.parametrize("misfortune", MISFORTUNES)
def test_all_ranks_end_alike_whatever_happens(misfortune: str) -> None:
    assert not search("", 80, SEED, (misfortune,))


def test_whoever_dies_or_is_stopped_at_any_step_the_others_end_alike() -> None:
    places = list_places(60, SEED)
    assert {"publish", "decide", "end_generation", "wake", "ring", "sleep_leading", "follow"} <= {
        name for name, _ in places
    }
    for place, runs in places.items():
        strike_at(place, runs[0], "kill")
        strike_at(place, runs[-1], "stop")


def test_every_letter_arrives_once_and_whole_and_cancelling_loses_none() -> None:
    assert not search_letters("", 250, SEED)


@pytest.mark.parametrize("fault", PLANTED)
def test_the_model_notices_a_precaution_that_is_left_out(fault: str) -> None:
    assert search(fault, 3000, SEED, PLANTED[fault])


@pytest.mark.parametrize("fault", PLANTED_IN_LETTERS)
def test_the_model_notices_a_precaution_of_letters_that_is_left_out(fault: str) -> None:
    assert search_letters(fault, 3000, SEED)
