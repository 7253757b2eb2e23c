"""The keys of `collectived top`."""

from __future__ import annotations

import re

import pytest

from collectived_launcher.top.state import KEYS, VIEWS, TopState, View, apply_key, parse_keys


def pressed(state: TopState, *names: str, rows: int = 100, page: int = 20) -> TopState:
    for name in names:
        state = apply_key(state, name, rows, page)
    return state


def test_what_is_typed_at_once_is_taken_key_by_key() -> None:
    assert parse_keys(b"g\x1b[A\x1bOB\x1b[5~\x1b[Z\t\r q\x04") == [
        *("g", "up", "down", "page up", "previous", "next", "enter", "p", "q", "q")
    ]
    assert parse_keys(b"\x1b") == ["escape"]
    assert parse_keys("ä\x00".encode()) == ["Ã", "¤", "\x00"], "what is no key of ours does no harm"


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_has_its_number_and_its_letter(view: View) -> None:
    assert pressed(TopState(), str(VIEWS.index(view) + 1)).view is view
    assert pressed(TopState(), view.value[0].upper()).view is view


def test_tab_goes_round() -> None:
    assert [pressed(TopState(), *["next"] * count).view for count in range(7)] == [*VIEWS, View.FINDINGS]
    assert pressed(TopState(), "previous").view is View.FAILURES


def test_another_view_begins_at_its_top_and_hides_the_help() -> None:
    state = pressed(TopState(), "r", "end")
    assert state.offset == 80
    assert pressed(state, "r") == state, "the same view stays where it is"
    assert pressed(state, "?", "g") == TopState(View.GROUPS)


def test_scrolling_stays_inside() -> None:
    assert pressed(TopState(), "up").offset == 0
    assert pressed(TopState(), "down", "down").offset == 2
    assert pressed(TopState(), "page down", "page down").offset == 40
    assert pressed(TopState(), "end", "down").offset == 80
    assert pressed(TopState(), "end", "home").offset == 0
    assert pressed(TopState(), "end", rows=3).offset == 0
    assert pressed(TopState(offset=80), "up", rows=10).offset == 0, "the list became shorter meanwhile"


def test_pause_help_and_quit() -> None:
    assert pressed(TopState(), "p").paused and not pressed(TopState(), "p", "p").paused
    assert pressed(TopState(), "?").help and not pressed(TopState(), "?", "escape").help
    assert pressed(TopState(), "q").quit_requested and pressed(TopState(), "Q").quit_requested
    assert pressed(TopState(), "enter").ask_now
    assert pressed(TopState(), "x", "é", "\x00") == TopState()


def test_the_interval_goes_by_steps_and_has_ends() -> None:
    assert pressed(TopState(), "+").interval == 0.5
    assert pressed(TopState(), "-").interval == 2
    assert pressed(TopState(), *["+"] * 20).interval == 0.2
    assert pressed(TopState(), *["-"] * 20).interval == 60
    assert pressed(TopState(interval=3), "+").interval == 2, "one that was given on the command line too"


def test_the_help_names_every_key() -> None:
    text = " ".join(f"{key} {meaning}" for key, meaning in KEYS)
    for word in ("1 … 6", "Tab", "Shift-Tab", "Page Up", "Page Down", "Home", "End", "Enter", "Space", "Ctrl-C", "j k"):
        assert word in text
    assert all(re.search(rf"\b{view.value[0]}\b", text) for view in VIEWS)
