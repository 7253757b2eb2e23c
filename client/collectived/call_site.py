"""The caller's file and line: the first frame outside this package, found by walking frames, without tracebacks."""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType, TracebackType

from collectived.arguments import escape_surrogates

_own_prefixes: tuple[str, ...] = (os.path.dirname(__file__) + os.sep, threading.__file__)
_frameless = ""
_short: dict[str, str] = {}


def shorten_path(filename: str) -> str:
    """The name of a source file without its folders, as errors show it."""
    short = _short.get(filename)
    if short is None:
        short = _short[filename] = escape_surrogates(os.path.basename(filename))
    return short


def skip_frames_under(folder: str) -> None:
    """Frames of files under `folder` are not the caller's either: that library calls us on the caller's behalf."""
    global _own_prefixes
    _own_prefixes += (folder + os.sep,)


def find_caller(depth: int) -> FrameType | None:
    """The caller's frame, from the `depth`-th on, this being the 0th; None where no frame is the caller's."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename.startswith(_own_prefixes):
        frame = frame.f_back
    return frame


def list_own(frame: FrameType | None) -> tuple[CodeType, ...] | None:
    """The code of this library's frames, from this one up to the caller's; None where no frame is the caller's."""
    own = []
    while frame is not None and frame.f_code.co_filename.startswith(_own_prefixes):
        own.append(frame.f_code)
        frame = frame.f_back
    return None if frame is None else tuple(own)


def name_frameless(name: str) -> None:
    """Set the answer of `caller` where no frame is the caller's, as in threads of another library."""
    global _frameless
    _frameless = name


def caller() -> str:
    """The line that called into this package: `train.py:88`.

    Without such a line, the name that `name_frameless` set.
    """
    return name_frame(find_caller(2))


def name_frame(frame: FrameType | None) -> str:
    """A frame of the caller's by file and line."""
    return _frameless if frame is None else f"{shorten_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def describe_error(error: BaseException, traceback: TracebackType | None) -> str:
    """An exception in one line, with where the caller's own code raised it: `ValueError: loss is NaN (train.py:88)`."""
    place = ""
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not filename.startswith(_own_prefixes):
            place = f" ({shorten_path(filename)}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    try:
        message = str(error)
    except Exception as broken:  # theirs: it must not hide the error itself
        message = f"(its text cannot be had: {type(broken).__name__})"
    return f"{type(error).__name__}{': ' if message else ''}{message}{place}"
