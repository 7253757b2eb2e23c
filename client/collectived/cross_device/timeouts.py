"""The time limit of one call: a deadline made where the call comes in, and what is left of it at each step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

from collectived.connection import environment
from collectived.errors import DeadlineExceededError, UnavailableError
from collectived_proto.deadline import Deadline
from collectived_proto.options import CommunicationOptions

NO_DEADLINE = Deadline()
_MIN_SECONDS = 0.001  # seconds, with which what is started at the very end still ends by a verdict
_NEGLIGIBLE_SECONDS = 0.01  # seconds after which errors still name the caller's own number


def start_deadline(options: CommunicationOptions) -> tuple[CommunicationOptions, Deadline]:
    """The options with their time limit, be it that of the environment, and the deadline that begins with it."""
    if options.timeout_seconds is None and (default := environment.timeout()):
        options = replace(options, timeout_seconds=default)
    return options, Deadline.after(options.timeout_seconds)


def with_remaining_timeout(options: CommunicationOptions, deadline: Deadline) -> CommunicationOptions:
    """The same options with what is left of their time limit, if they have one."""
    given = options.timeout_seconds
    if not given or not deadline.is_set:
        return options
    left = deadline.remaining()
    return options if left > given - _NEGLIGIBLE_SECONDS else replace(options, timeout_seconds=max(_MIN_SECONDS, left))


def clamp_timeout(deadline: Deadline, most: float) -> float:
    """Seconds that a step may take which takes at most `most` by itself; never 0, which would mean forever."""
    return max(_MIN_SECONDS, min(deadline.remaining(), most))


@contextlib.contextmanager
def map_late_errors(deadline: Deadline) -> Iterator[None]:
    """Raises that a worker does not answer as what it is where the deadline has passed: DeadlineExceededError."""
    try:
        yield
    except UnavailableError as error:
        if deadline.remaining():
            raise
        raise DeadlineExceededError(str(error)) from error


@contextlib.contextmanager
def hold_lock(lock: threading.Lock, deadline: Deadline, what: str) -> Iterator[None]:
    """Holds a lock, which others may hold while they wait for a worker.

    Raises:
        DeadlineExceededError: `what` came to its deadline first.
    """
    if not lock.acquire(timeout=clamp_timeout(deadline, threading.TIMEOUT_MAX)):
        raise DeadlineExceededError(f"{what} waited until its deadline for calls of other threads on these devices")
    try:
        yield
    finally:
        lock.release()
