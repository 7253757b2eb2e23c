"""Limits of log lines: so few of one kind a second that no caller can fill a disk. The number left out is logged."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

MAX_LINES_PER_SECOND = 10  # lines of one kind: one place in the code, at one level
_MAX_CALL_SITES = 256  # that are remembered


@dataclass(slots=True)
class _CallSiteWindow:
    since: float
    count: int = 0
    suppressed: int = 0


class LogRateFilter(logging.Filter):
    """Lets so many lines of a kind through; the first one after that says how many were left out.

    A handler calls its filters under no lock: what two threads lose here is one count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._windows: OrderedDict[tuple[str, int, int], _CallSiteWindow] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, "facts"):  # failures of groups: each is news to some user, and joins are paced
            return True
        key = (record.pathname, record.lineno, record.levelno)
        kind = self._windows.get(key)
        if kind is None:
            kind = self._windows[key] = _CallSiteWindow(record.created)
            if len(self._windows) > _MAX_CALL_SITES:
                self._windows.popitem(last=False)
        if not 0 <= record.created - kind.since < 1.0:
            kind.since, kind.count = record.created, 0
            if kind.suppressed:
                record.msg = f"{record.getMessage()} ({kind.suppressed} more like this were left out before)"
                record.args = ()
                kind.suppressed = 0
        kind.count += 1
        if kind.count > MAX_LINES_PER_SECOND:
            kind.suppressed += 1
            return False
        return True
