"""The failure file: what a client of `collectived launch` leaves for the launcher when an exception ends it.

COLLECTIVED_FAILURE_FILE names it. From these files the launcher distinguishes the rank that failed from those that
failed because of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from collectived.call_site import describe_error
from collectived.errors import CollectiveError
from collectived_proto.types import Verdict

VARIABLE = "COLLECTIVED_FAILURE_FILE"
_MAX_LINES = 40  # of a traceback: its end says most
_MAX_LINE = 500  # characters of each
_MAX_MESSAGE = 4000


def install() -> None:
    """Write the file when an uncaught exception ends this process, and then call the former hook."""
    path = os.environ.get(VARIABLE)
    former, owner = sys.excepthook, os.getpid()
    if not path or getattr(former, "writes_failure_file", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == owner:  # a forked child does not end this rank
            with contextlib.suppress(OSError):
                Path(path).write_text(json.dumps(describe_failure(error)))
        former(kind, error, trace)

    hook.writes_failure_file = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def describe_failure(error: BaseException) -> dict[str, Any]:
    """Describe an exception for the launcher; `blamed` are the ranks that a verdict behind it blames."""
    verdict = _find_verdict(error)
    lines = "".join(traceback.format_exception(error)).splitlines()
    blamed = (*verdict.missing, *verdict.differing) if verdict else ()
    return {
        "pid": os.getpid(),
        "error": describe_error(error, error.__traceback__)[:_MAX_MESSAGE],
        "traceback": [line[:_MAX_LINE] for line in lines[-_MAX_LINES:]],
        "verdict": verdict.message[:_MAX_MESSAGE] if verdict else "",
        "blamed": [[member.rank, member.worker, member.pid] for member in blamed],
        "size": len(verdict.members) if verdict else 0,
    }


def _find_verdict(error: BaseException | None) -> Verdict | None:
    """The verdict of this exception, or of one that it was raised from or after."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, CollectiveError) and error.verdict is not None:
            return error.verdict
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
