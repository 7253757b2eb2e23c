"""What the environment of this process says, read where it is asked for and checked there."""

from __future__ import annotations

import getpass
import os

from collectived.arguments import sendable
from collectived_proto.options import seconds


def group_name() -> str:
    """Name of the group to join. Raises ValueError where nothing says it."""
    name = os.environ.get("COLLECTIVED_GROUP")
    if not name:
        raise ValueError("join() needs a name: give one, or set COLLECTIVED_GROUP (`collectived launch` does)")
    return name


def group_size() -> int:
    """Number of ranks. Raises ValueError where nothing says it."""
    size = _number("WORLD_SIZE")
    if size is None:
        raise ValueError("join() needs a size: give one, or set WORLD_SIZE (`collectived launch` does)")
    if size < 1:
        raise ValueError(f"WORLD_SIZE must be at least 1, it is {size}")
    return size


def rank(size: int) -> int | None:
    """This process's rank, where `size` is the size that RANK counts in."""
    return _number("RANK") if _number("WORLD_SIZE") in (None, size) else None


def timeout() -> float | None:
    """Seconds that a collective may take where neither call nor group says it."""
    text = os.environ.get("COLLECTIVED_TIMEOUT")
    if not text:
        return None
    try:
        return seconds(float(text), "COLLECTIVED_TIMEOUT")
    except ValueError:
        raise ValueError(f"COLLECTIVED_TIMEOUT must be seconds, not negative: it is {text!r}") from None


def job() -> str:
    """The job whose group names this process shares."""
    found = _first("COLLECTIVED_JOB", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
    if found:
        return sendable(found)
    try:
        return sendable(getpass.getuser())
    except (KeyError, OSError):  # a uid without a name
        return f"uid-{os.getuid()}"


def label() -> str:
    """How people know this process; '' where nothing says it."""
    found = _first("COLLECTIVED_LABEL", "POD_NAME")
    step = os.environ.get("SLURM_STEP_ID")
    return sendable(found or (f"slurm {os.environ.get('SLURM_JOB_ID')}.{step}" if step else ""))


def _first(*names: str) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, it is {text!r}") from None
