"""What is told at the end of a job: the first failure first, because the others are mostly its consequences."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """How one process ended: who it is and how it ended, in words; `last_signal` is the last signal that the launcher
    had sent it, if any."""

    process: str
    reason: str
    stderr_tail: tuple[str, ...] = ()
    last_signal: int | None = None

    def __str__(self) -> str:
        return f"{self.process}: {self.reason}{self._describe_last_signal()}"

    def _describe_last_signal(self) -> str:
        if self.last_signal is None:
            return ""
        return f", after the launcher had sent {signal_name(self.last_signal)}"


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def describe_status(status: int) -> str:
    """`Popen.returncode` in words."""
    return f"killed by signal {-status} ({signal_name(-status)})" if status < 0 else f"exit status {status}"


def format_times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def format_summary(failures: Sequence[ProcessFailure], started_again: Mapping[str, Mapping[str, int]]) -> Iterable[str]:
    """Lines about what failed, in the order in which it failed, after those about daemons, whose ends are mostly why.

    Args:
        started_again: daemon -> in words how it had ended -> how often.
    """
    for name, ends in started_again.items():
        how = [end if len(ends) == 1 else f"{end} {format_times(count)}" for end, count in ends.items()]
        yield f"collectived: {name} was started again {format_times(sum(ends.values()))}: {', '.join(how)}"
    if not failures:
        return
    first, *others = failures
    yield f"collectived: first failure: {first}"
    yield from (f"    {line}" for line in first.stderr_tail)
    for other in others:
        yield f"collectived: then: {other}"
