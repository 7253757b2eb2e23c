"""How a job that did not end well is told: the first failure first, because the others are mostly its consequences."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ending:
    """How one process ended. `sent` is the last signal that the launcher had sent it, if any."""

    name: str
    pid: int
    status: int
    last_words: tuple[str, ...] = ()
    sent: int | None = None

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}): {describe(self.status)}{self._why()}"

    def _why(self) -> str:
        if self.sent is None:
            return ""
        return f", after the launcher had sent {signal_name(self.sent)}"


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def describe(status: int) -> str:
    """`Popen.returncode` in words."""
    return f"killed by signal {-status} ({signal_name(-status)})" if status < 0 else f"exit status {status}"


def summary(failures: Sequence[Ending]) -> Iterable[str]:
    """Lines about what failed, in the order in which it failed."""
    if not failures:
        return
    first, *others = failures
    yield f"collectived: first failure: {first}"
    yield from (f"    {line}" for line in first.last_words)
    for other in others:
        yield f"collectived: then: {other}"
