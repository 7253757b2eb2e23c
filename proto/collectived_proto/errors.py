"""Errors, sorted by the caller's next step.

    CollectiveError
    ├── InvalidArgumentError (ValueError)      ranks differ, or a call is wrong: fix it; the group goes on
    ├── UnimplementedError                     this cannot be done here: choose another way
    ├── DeadlineExceededError (TimeoutError)   a rank did not come in time   ┐
    ├── UnavailableError                       a rank, worker or link is lost │ the generation is over:
    ├── AbortedError                           a rank aborted or left         │ join again, or end
    ├── CancelledError                         the call was withdrawn         │
    ├── InternalError                          a defect of collectived        ┘
    ├── FailedPreconditionError                wrong moment: after a fork, after leave, after close
    ├── ResourceExhaustedError                 too much memory or too many calls at once
    ├── NotFoundError                          no such group, session or collective
    ├── PermissionDeniedError                  the caller is not allowed to do this
    └── UnauthenticatedError                   the caller is not identified

The class decides what comes next, so that all ranks choose the same: `.rejoin` is True if the generation is over.
"""

from __future__ import annotations

import builtins
import enum

from collectived_proto.cause import Cause
from collectived_proto.types import Member, Verdict


class Code(enum.IntEnum):
    """Canonical codes, numbered as in gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class CollectiveError(Exception):
    """Base of all errors of collectives and of the runtime.

    Attributes:
        code: the canonical code.
        verdict: the decision about the group, the same on every rank; None if only this caller is affected.
        site: file:line of the failed call, if known.
        out_intact: whether nothing was written into the `out` of that call; False: its content is undefined.
    """

    code: Code = Code.UNKNOWN
    out_intact = True

    def __init__(
        self, message: str = "", *, verdict: Verdict | None = None, site: str = "", about: Verdict | None = None
    ) -> None:
        """`about` is what is known of a failure that concerns this caller alone."""
        super().__init__(message)
        self.verdict = verdict
        self.site = site
        self._about = verdict or about

    @property
    def group(self) -> str:
        """Name of the group, or ''."""
        return self._about.group if self._about else ""

    @property
    def generation(self) -> int:
        return self._about.generation if self._about else 0

    @property
    def instance(self) -> int:
        """The first instance that failed; -1 where none was running."""
        return self._about.instance if self._about else -1

    @property
    def op(self) -> str:
        """The operation of that instance."""
        return self._about.op if self._about else ""

    @property
    def missing(self) -> tuple[Member, ...]:
        """Ranks that did not arrive, were lost or left."""
        return self._about.missing if self._about else ()

    @property
    def differing(self) -> tuple[Member, ...]:
        """Ranks whose contract differs from the majority's; if missing ranks would decide it, all that have arrived."""
        return self._about.differing if self._about else ()

    @property
    def members(self) -> tuple[Member, ...]:
        """Every rank, with the last instance that it is known to have finished."""
        return self._about.members if self._about else ()

    @property
    def decided_by(self) -> str:
        return self._about.decided_by if self._about else ""

    @property
    def rejoin(self) -> bool:
        """Whether the generation is over, so that the group must be joined again."""
        return self.verdict is not None and self.verdict.successor == 0


class InvalidArgumentError(CollectiveError, ValueError):
    """Ranks called different collectives, or an argument is wrong."""

    code = Code.INVALID_ARGUMENT


class DeadlineExceededError(CollectiveError, builtins.TimeoutError):
    """A collective did not end by its deadline; `.missing` names the ranks that did not come."""

    code = Code.DEADLINE_EXCEEDED


class AbortedError(CollectiveError):
    """A rank aborted the group, or left it."""

    code = Code.ABORTED


class UnavailableError(CollectiveError):
    """A member of the group is lost, or a worker or the coordinator cannot be reached."""

    code = Code.UNAVAILABLE


class FailedPreconditionError(CollectiveError):
    """The call is right but comes at the wrong moment: after a fork, after `leave`, after `close`."""

    code = Code.FAILED_PRECONDITION


class UnimplementedError(CollectiveError):
    """This worker or device cannot do this."""

    code = Code.UNIMPLEMENTED


class CancelledError(CollectiveError):
    """The call was withdrawn."""

    code = Code.CANCELLED


class ResourceExhaustedError(CollectiveError):
    """This rank uses too much memory or has too many collectives in flight."""

    code = Code.RESOURCE_EXHAUSTED


class PermissionDeniedError(CollectiveError):
    """The caller is known and may not do this."""

    code = Code.PERMISSION_DENIED


class UnauthenticatedError(CollectiveError):
    """The caller has not identified itself."""

    code = Code.UNAUTHENTICATED


class NotFoundError(CollectiveError):
    """No such group, session, device or prepared collective."""

    code = Code.NOT_FOUND


class InternalError(CollectiveError):
    """A defect of collectived."""

    code = Code.INTERNAL


CODE_BY_CAUSE: dict[Cause, Code] = {
    Cause.DEADLINE: Code.DEADLINE_EXCEEDED,
    Cause.LOST_RANK: Code.UNAVAILABLE,
    Cause.LOST_WORKER: Code.UNAVAILABLE,
    Cause.LOST_LINK: Code.UNAVAILABLE,
    Cause.ABORTED: Code.ABORTED,
    Cause.LEFT: Code.ABORTED,
    Cause.MISMATCH: Code.INVALID_ARGUMENT,
    Cause.EXHAUSTED: Code.RESOURCE_EXHAUSTED,
    Cause.NATIVE: Code.UNAVAILABLE,
    Cause.DRAINED: Code.UNAVAILABLE,
    Cause.FORGOTTEN: Code.UNAVAILABLE,
    Cause.CANCELLED: Code.CANCELLED,
    Cause.REFUSED: Code.UNAVAILABLE,
    Cause.DEFECT: Code.INTERNAL,
    Cause.LINK_REFUSED: Code.UNAVAILABLE,
}
"""The code of a verdict with that cause, where a refusal does not bring one of its own."""

_BY_CODE: dict[int, type[CollectiveError]] = {
    kind.code: kind
    for kind in (
        InvalidArgumentError,
        DeadlineExceededError,
        AbortedError,
        UnavailableError,
        FailedPreconditionError,
        UnimplementedError,
        CancelledError,
        ResourceExhaustedError,
        PermissionDeniedError,
        UnauthenticatedError,
        NotFoundError,
        InternalError,
    )
}


def error_class(code: int) -> type[CollectiveError]:
    """The class of a canonical code; `InternalError` for codes that no process should send."""
    return _BY_CODE.get(code, InternalError)


def error_from_verdict(verdict: Verdict, site: str = "") -> CollectiveError:
    """The exception that a verdict is raised as; a new object each time, for tracebacks are per raise."""
    return error_class(verdict.code)(verdict.message, verdict=verdict, site=site)
