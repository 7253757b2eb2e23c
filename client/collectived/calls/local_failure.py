"""Failures of this process itself, as causes and messages: no descriptors or memory left, or a defect."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator

from collectived_proto.cause import Cause
from collectived_proto.errors import (
    CODE_BY_CAUSE,
    CancelledError,
    CollectiveError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnimplementedError,
    error_class,
)

if sys.platform != "win32":
    import resource


_REFUSALS = (  # NotFoundError is none: it may come after the submission
    TypeError,
    ValueError,
    CancelledError,
    FailedPreconditionError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnimplementedError,
)


def is_refusal(error: BaseException) -> bool:
    """Whether an error is of a class that refuses a call. If the call has no number yet, nothing was submitted."""
    return isinstance(error, _REFUSALS)


def classify_failure(error: Exception) -> tuple[Cause, str]:
    """Return the cause and the message of a verdict that follows from an error of this process."""
    if isinstance(error, DeadlineExceededError):
        return Cause.DEADLINE, str(error)
    if isinstance(error, ResourceExhaustedError):
        return Cause.EXHAUSTED, str(error)
    if isinstance(error, CollectiveError):
        return Cause.DEFECT if isinstance(error, InternalError) else Cause.REFUSED, str(error)
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return Cause.EXHAUSTED, (
            f"this process has no descriptor left: its limit RLIMIT_NOFILE is {_descriptor_limit()}; close files, or "
            "raise the limit (`ulimit -n`)"
        )
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in (errno.ENFILE, errno.ENOMEM)):
        return Cause.EXHAUSTED, f"this process gets no more of what it needs: {error or 'no memory is left'}"
    return Cause.DEFECT, f"{type(error).__name__}: {error}"


def is_out_of_resources(error: Exception) -> bool:
    """Whether this process has run out of something, so that the error says nothing about other processes."""
    return classify_failure(error)[0] is Cause.EXHAUSTED


def _descriptor_limit() -> str:
    if sys.platform == "win32":
        return "not known"
    return str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def descriptor_lost() -> OSError:
    """A descriptor was sent to this process, which had no room for it: the kernel has dropped it."""
    return OSError(errno.EMFILE, "too many open files")


@contextlib.contextmanager
def typed_failures(what: str) -> Iterator[None]:
    """Errors of the system in here are raised as a CollectiveError that says what could not be done."""
    try:
        yield
    except (OSError, MemoryError) as error:
        if isinstance(error, CollectiveError):
            raise
        cause, text = classify_failure(error)
        raise error_class(CODE_BY_CAUSE[cause])(f"{what}: {text}") from error
