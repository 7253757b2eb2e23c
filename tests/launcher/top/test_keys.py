"""The keys of `collectived top`."""

from __future__ import annotations

import re

import pytest

from collectived_launcher.top.state import KEYS, VIEWS, State, View, keys, press


def pressed(state: State, *names: str, rows: int = 100, page: int = 20) -> State:
    for name in names:
        state = press(state, name, rows, page)
    return state


def test_what_is_typed_at_once_is_taken_key_by_key() -> None:
    assert keys(b"g\x1b[A\x1bOB\x1b[5~\x1b[Z\t\r q\x04") == [
        *("g", "up", "down", "page up", "previous", "next", "enter", "p", "q", "q")
    ]
    assert keys(b"\x1b") == ["escape"]
    assert keys("ä\x00".encode()) == ["Ã", "¤", "\x00"], "what is no key of ours does no harm"


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_has_its_number_and_its_letter(view: View) -> None:
    assert pressed(State(), str(VIEWS.index(view) + 1)).view is view
    assert pressed(State(), view.value[0].upper()).view is view


def test_tab_goes_round() -> None:
    assert [pressed(State(), *["next"] * count).view for count in range(7)] == [*VIEWS, View.HURTS]
    assert pressed(State(), "previous").view is View.FAILURES


def test_another_view_begins_at_its_top_and_hides_the_help() -> None:
    state = pressed(State(), "r", "end")
    assert state.offset == 80
    assert pressed(state, "r") == state, "the same view stays where it is"
    assert pressed(state, "?", "g") == State(View.GROUPS)


def test_scrolling_stays_inside() -> None:
    assert pressed(State(), "up").offset == 0
    assert pressed(State(), "down", "down").offset == 2
    assert pressed(State(), "page down", "page down").offset == 40
    assert pressed(State(), "end", "down").offset == 80
    assert pressed(State(), "end", "home").offset == 0
    assert pressed(State(), "end", rows=3).offset == 0
    assert pressed(State(offset=80), "up", rows=10).offset == 0, "the list became shorter meanwhile"


def test_pause_help_and_quit() -> None:
    assert pressed(State(), "p").paused and not pressed(State(), "p", "p").paused
    assert pressed(State(), "?").help and not pressed(State(), "?", "escape").help
    assert pressed(State(), "q").over and pressed(State(), "Q").over
    assert pressed(State(), "enter").ask_now
    assert pressed(State(), "x", "é", "\x00") == State()


def test_the_interval_goes_by_steps_and_has_ends() -> None:
    assert pressed(State(), "+").interval == 0.5
    assert pressed(State(), "-").interval == 2
    assert pressed(State(), *["+"] * 20).interval == 0.2
    assert pressed(State(), *["-"] * 20).interval == 60
    assert pressed(State(interval=3), "+").interval == 2, "one that was given on the command line too"


def test_the_help_names_every_key() -> None:
    text = " ".join(f"{key} {meaning}" for key, meaning in KEYS)
    for word in ("1 … 6", "Tab", "Shift-Tab", "Page Up", "Page Down", "Home", "End", "Enter", "Space", "Ctrl-C", "j k"):
        assert word in text
    assert all(re.search(rf"\b{view.value[0]}\b", text) for view in VIEWS)
