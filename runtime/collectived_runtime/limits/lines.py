"""Lines of a log: so few of one kind a second that nobody can fill a disk; how many more there were is said."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

MOST_A_SECOND = 10  # lines of one kind: one place in the code, at one level
_KINDS = 256  # that are remembered


@dataclass(slots=True)
class _Kind:
    since: float
    said: int = 0
    left_out: int = 0


class Sparing(logging.Filter):
    """Lets so many lines of a kind through; the first one after that tells how many were left out.

    A handler calls its filters under no lock: what two threads lose here is one count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: OrderedDict[tuple[str, int, int], _Kind] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, "facts"):  # failures of groups: each is news to somebody, and joins are paced
            return True
        key = (record.pathname, record.lineno, record.levelno)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(record.created)
            if len(self._kinds) > _KINDS:
                self._kinds.popitem(last=False)
        if not 0 <= record.created - kind.since < 1.0:
            kind.since, kind.said = record.created, 0
            if kind.left_out:
                record.msg = f"{record.getMessage()} ({kind.left_out} more like this were left out before)"
                record.args = ()
                kind.left_out = 0
        kind.said += 1
        if kind.said > MOST_A_SECOND:
            kind.left_out += 1
            return False
        return True
