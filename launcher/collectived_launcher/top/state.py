"""The choices of the user at the keyboard, and the effect of each key. Pure."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace

INTERVALS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # seconds between questions, for + and -


class View(enum.Enum):
    """Named as on the screen, in the order of the keys 1 to 6; its first letter is its key too."""

    FINDINGS = "alerts"
    GROUPS = "groups"
    RANKS = "ranks"
    IN_FLIGHT = "in flight"
    WORKERS = "workers"
    FAILURES = "failures"


VIEWS = tuple(View)
KEYS = (
    ("1 … 6", "select a view; also a, g, r, i, w, f, their first letters; Tab and Shift-Tab go through the views"),
    ("↑ ↓ j k", "move one row; Page Up, Page Down, Home and End move further"),
    ("p, Space", "pause; again: go on"),
    ("+ -", "ask more or less often"),
    ("Enter", "ask now"),
    ("?", "show these keys"),
    ("q, Ctrl-C", "quit"),
)
_VIEW_BY_KEY = {str(number): view for number, view in enumerate(VIEWS, 1)} | {view.value[0]: view for view in VIEWS}
_KEY_NAMES = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"k": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"j": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1bOH": "home",
    b"\x1b[1~": "home",
    b"\x1b[F": "end",
    b"\x1bOF": "end",
    b"\x1b[4~": "end",
    b"\t": "next",
    b"\x1b[C": "next",
    b"\x1bOC": "next",
    b"\x1b[Z": "previous",
    b"\x1b[D": "previous",
    b"\x1bOD": "previous",
    b" ": "p",
    b"=": "+",
    b"_": "-",
    b"\n": "enter",
    b"\r": "enter",
    b"\x1b": "escape",
    b"\x04": "q",  # the end of input, as typed
}
_KEY = re.compile(rb"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TopState:
    """`offset`: rows of the view that lie above the screen. `ask_now`: the next question is due at once."""

    view: View = View.FINDINGS
    interval: float = 1.0
    offset: int = 0
    paused: bool = False
    help: bool = False
    ask_now: bool = False
    quit_requested: bool = False


def parse_keys(typed: bytes) -> list[str]:
    """The keys that were typed, by name; other bytes stand for themselves."""
    return [_KEY_NAMES.get(key, key.decode("latin-1")) for key in _KEY.findall(typed)]


def apply_key(state: TopState, key: str, rows: int, page: int) -> TopState:
    """Return the state after a key, where the view has `rows` and the screen shows a `page` of them."""
    if key in ("q", "Q"):
        return replace(state, quit_requested=True)
    if key == "?":
        return replace(state, help=not state.help)
    if key == "escape":
        return replace(state, help=False)
    if view := _VIEW_BY_KEY.get(key.lower()):
        return _switch_view(state, view)
    match key:
        case "next":
            return _switch_view(state, VIEWS[(VIEWS.index(state.view) + 1) % len(VIEWS)])
        case "previous":
            return _switch_view(state, VIEWS[VIEWS.index(state.view) - 1])
        case "p" | "P":
            return replace(state, paused=not state.paused)
        case "+":
            return replace(
                state, interval=max((one for one in INTERVALS if one < state.interval), default=INTERVALS[0])
            )
        case "-":
            return replace(
                state, interval=min((one for one in INTERVALS if one > state.interval), default=INTERVALS[-1])
            )
        case "enter":
            return replace(state, ask_now=True)
    return replace(state, offset=_scroll(state.offset, key, rows, page))


def _switch_view(state: TopState, view: View) -> TopState:
    return replace(state, view=view, help=False, offset=state.offset if view is state.view else 0)


def _scroll(offset: int, key: str, rows: int, page: int) -> int:
    steps = {"up": -1, "down": 1, "page up": -page, "page down": page, "home": -rows, "end": rows}
    return clamp_offset(offset + steps.get(key, 0), rows, page)


def clamp_offset(offset: int, rows: int, page: int) -> int:
    """The offset that keeps the screen full where there are rows enough."""
    return max(0, min(offset, rows - page))
