"""Where the threads of this process are, in a few short lines: what a rank does instead, that others wait for."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

from collectived.call_site import shorten_path
from collectived_proto.ipc.messages import MAX_STACK

OWN_THREADS = "collectived-"  # how the names of our threads begin: they are not the caller's
_MAX_THREADS = 8
_MAX_FRAMES = 6  # of each
_OWN_PREFIX = os.path.dirname(__file__) + os.sep
_BOOTSTRAP = ("run", "_bootstrap", "_bootstrap_inner")  # of `threading`: where every thread begins


def describe_threads(first: int) -> str:
    """One thread a line, the innermost call first: `data.py:88 in load_batch <- train.py:12 in main`.

    Calls within this package are one, by the name that the caller knows: `all_reduce of collectived`.

    Args:
        first: ident of the thread that is told of first, as long as it lives; the main one follows, then others.
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
    calls: list[str] = []
    while frame is not None and len(calls) < _MAX_FRAMES:
        code = frame.f_code
        if code.co_filename == threading.__file__ and code.co_name in _BOOTSTRAP:
            break
        outer = frame.f_back
        if not code.co_filename.startswith((_OWN_PREFIX, "<frozen ")):
            calls.append(f"{shorten_path(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
        elif code.co_filename.startswith(_OWN_PREFIX) and not (outer and _is_ours(outer)):
            calls.append(f"{code.co_name} of collectived")
        frame = outer
    return " <- ".join(calls)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OWN_PREFIX)
