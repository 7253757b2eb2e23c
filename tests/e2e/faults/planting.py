"""Errors planted at lines of the library: which lines an action comes to, and an error at one of them."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import collectived as cd
from collectived.shared.segment_channel import SegmentChannel

OURS = ("/collectived/", "/collectived_proto/")
STRIDE = int(os.environ.get("COLLECTIVED_TEST_STRIDE", "9"))

# Where no error can be planted, and why; at every other line to which a step comes one is.
ASSIGNMENTS = {  # that allocate nothing; and finalizers, out of which no error comes
    f"{name}.{method}" for name in ("InputSlot", "MappedResult", "Block") for method in ("__init__", "__del__")
}
HARMLESS = (
    "try:",  # no instruction
    "if held:",  # a local name is looked at, on the way to what releases a lock
    "self._lock.release()",  # one call, that an error cannot come before
)
# Where no line is left out: what is read is lost with an error there, and other threads may wait for this one.
READING = ("LeaderFollower.lead", "LeaderFollower._resign", "Doorbell._read", "Doorbell._receive", "receive")
Line = tuple[CodeType, int]
OnLine = Callable[[FrameType, int], None]


class Planted(Exception):
    """Stands for a defect of the library."""


def find_position(group: cd.Group) -> Any:
    """Where a rank stands: its generation, how that has ended, and the numbers of what it does next."""
    channel = group._channel
    posted: Any = channel.rank_state.next_p2p
    if isinstance(channel, SegmentChannel):
        channel._count_instances()  # what completes at once is not counted one by one
        posted = posted, repr(channel._post_numbers)
    state = channel.rank_state
    return state.generation, state.verdict, state.next_instance, posted


class Plant:
    """Raises an error at a line, once; an `OnLine`."""

    def __init__(self, line: Line, error: BaseException) -> None:
        self._line = line
        self._left = [error]

    @property
    def is_planted(self) -> bool:
        return not self._left

    def __call__(self, frame: FrameType, number: int) -> None:
        if (frame.f_code, number) == self._line and self._left:
            raise self._left.pop()


@functools.cache
def read_line(file: str, number: int) -> str:
    return linecache.getline(file, number).strip()


@functools.cache
def is_ours(code: CodeType) -> bool:
    return any(part in code.co_filename for part in OURS) and code.co_qualname not in ASSIGNMENTS


def make_trace(on_line: OnLine) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that tells of every line of ours.

    Not where nothing can go wrong: at `try:`, which is no instruction, at the end of a `with` and where else a lock is
    released, which is one call that an error cannot come before.
    """

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not is_ours(frame.f_code):
            return None
        entered: dict[int, int] = {}

        def line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                number = frame.f_lineno
                text = read_line(frame.f_code.co_filename, number)
                entered[number] = entered.get(number, 0) + 1
                leaves = text.startswith("with ") and not entered[number] % 2
                if text not in HARMLESS and not leaves:
                    on_line(frame, number)
            return line

        return line

    return trace


def watch(act: Callable[[], Any], on_line: OnLine) -> Any:
    """Runs `act`; `on_line` is told of every line of ours that it comes to, and may raise there."""
    # Held here: a finalizer may run while the interpreter calls the function, and an error there makes it let go of it.
    trace = make_trace(on_line)
    sys.settrace(trace)
    try:
        return act()
    finally:
        sys.settrace(None)


@contextmanager
def watch_threads(on_line: OnLine) -> Iterator[None]:
    """The same of the threads that the library starts meanwhile."""
    trace = make_trace(on_line)

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        is_its_own = threading.current_thread().name.startswith("collectived")
        return trace(frame, event, argument) if is_its_own else None

    threading.settrace(begin)
    try:
        yield
    finally:
        threading.settrace(None)


def find_lines(play: Callable[[OnLine], None]) -> dict[Line, bool]:
    """The lines to which a scene comes, and whether each time."""
    counts: Counter[Line] = Counter()
    play(lambda *_: None)  # where only the first one comes, no error can be planted
    for _ in range(3):
        lines: dict[Line, None] = {}
        play(lambda frame, number: lines.setdefault((frame.f_code, number)))  # noqa: B023
        counts.update(list(lines))
    return {line: count == 3 for line, count in counts.items()}


def name_line(line: Line) -> str:
    code, number = line
    return f"{code.co_filename}:{number}, in {code.co_qualname}"
