"""Where the threads of this process are, in a few short lines: what a rank does instead, that others wait for."""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType

from collectived.call_site import shorten_path
from collectived_proto.ipc.messages import MAX_STACK

OWN_THREADS = "collectived-"  # how the names of our threads begin: they are not the caller's
_MAX_THREADS = 8
_MAX_FRAMES = 6  # of each
_MAX_DEPTH = 200  # of calls that are looked at
_STANDARD_PREFIX = os.path.dirname(os.__file__) + os.sep
_OWN_PREFIX = os.path.dirname(__file__) + os.sep
_BOOTSTRAP = ("run", "_bootstrap", "_bootstrap_inner")  # of `threading`: where every thread begins


def describe_threads(first: int) -> str:
    """One thread a line, the innermost call first: `data.py:88 in load_batch <- train.py:12 in main`.

    Calls within this package are one, by the name that the caller knows: `all_reduce of collectived`.

    Args:
        first: ident of the thread that comes first, as long as it lives; the main one follows, then others.
    """
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines: list[str] = []
    for ident in dict.fromkeys([first, threading.main_thread().ident or 0, *frames]):
        frame, name = frames.get(ident), names.get(ident, "")
        stack = _describe_stack(frame) if frame is not None and not name.startswith(OWN_THREADS) else ""
        if stack:
            lines.append(f"thread {name or ident}: {stack}" if lines else stack)
    return "\n".join(lines[:_MAX_THREADS]).encode(errors="backslashreplace")[:MAX_STACK].decode(errors="ignore")


def _describe_stack(frame: FrameType | None) -> str:
    """The innermost calls; and, where all of these are in libraries, the innermost one of the caller's program."""
    calls: list[str] = []
    is_callers = False
    for _ in range(_MAX_DEPTH):
        if frame is None or (frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name in _BOOTSTRAP):
            break
        code, outer = frame.f_code, frame.f_back
        if len(calls) == _MAX_FRAMES:
            if is_callers or not _is_of_program(code):
                frame = None if is_callers else outer
                continue
            calls.append(f"… <- {_name_call(frame)}")
            break
        if not code.co_filename.startswith((_OWN_PREFIX, "<frozen ")):
            calls.append(_name_call(frame))
            is_callers = is_callers or _is_of_program(code)
        elif code.co_filename.startswith(_OWN_PREFIX) and not (outer and _is_ours(outer)):
            calls.append(f"{code.co_name} of collectived")
        frame = outer
    return " <- ".join(calls)


def _name_call(frame: FrameType) -> str:
    return f"{shorten_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_of_program(code: CodeType) -> bool:
    """Whether its path is in no folder of a library."""
    name = code.co_filename
    return not (name.startswith((_OWN_PREFIX, _STANDARD_PREFIX, "<frozen ")) or "-packages" + os.sep in name)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OWN_PREFIX)
