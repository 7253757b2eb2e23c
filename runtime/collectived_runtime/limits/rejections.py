"""Refusals: what was turned down because a limit was reached, or because it was no message of its protocol.

The code that refuses counts them; metrics and status read the counts. Each count is kept by one thread alone, or is
about so rare a thing that one which is lost between two threads does not matter.
"""

from __future__ import annotations

import enum
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

MAX_USERS = 4096  # that are remembered; the one that has been quiet for longest is forgotten


class Limit(enum.StrEnum):
    """The limits that refuse requests; the value is the label of the metric."""

    SESSIONS = "sessions"
    SESSION_RANKS = "session_ranks"
    SESSION_MEMORY = "session_memory"
    SESSION_GPU_MEMORY = "session_gpu_memory"
    SESSION_ARENAS = "session_arenas"
    SESSION_OPENINGS = "session_openings"
    MEMORY = "memory"
    IN_FLIGHT = "in_flight"
    GROUPS = "groups"
    GROUP_RANKS = "group_ranks"
    HANDSHAKES = "handshakes"
    LINKS = "links"
    LOGINS = "logins"
    DESCRIPTORS = "descriptors"
    UNREAD = "unread"


COORDINATOR_LIMITS = (Limit.GROUPS, Limit.GROUP_RANKS, Limit.LOGINS, Limit.DESCRIPTORS)
WORKER_LIMITS = tuple(limit for limit in Limit if limit is not Limit.GROUP_RANKS)


class MessageSource(enum.StrEnum):
    """Where something came that is no message of its protocol."""

    SOCKET = "socket"  # the first message of a client at the Unix socket
    SESSION = "session"  # its session socket
    DOORBELL = "doorbell"
    HANDSHAKE = "handshake"  # of a link
    LINK = "link"  # a frame
    GRPC = "grpc"


class RejectionCounters:
    """See the module; `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.limit_counts: Counter[Limit] = Counter()
        self.malformed_counts: Counter[MessageSource] = Counter()
        self.last_limited: dict[Limit, float] = {}
        """When each limit was met last."""
        self._uncharged_malformed: OrderedDict[str, int] = OrderedDict()

    def count_limit(self, which: Limit) -> None:
        self.limit_counts[which] += 1
        self.last_limited[which] = self._clock()

    def count_malformed(self, where: MessageSource, uid: int | None = None) -> None:
        """Count a message; `uid`: of the local user that has sent it, and is charged for it."""
        self.malformed_counts[where] += 1
        if uid is not None:
            key = format_uid_key(uid)
            self._uncharged_malformed[key] = self._uncharged_malformed.pop(key, 0) + 1
            if len(self._uncharged_malformed) > MAX_USERS:
                self._uncharged_malformed.popitem(last=False)

    def take_malformed(self, user: str) -> int:
        """How many a user (`format_uid_key`) has sent since this was asked last."""
        return self._uncharged_malformed.pop(user, 0)


def format_uid_key(uid: int) -> str:
    """By what a local user is counted; never an address."""
    return f"uid {uid}"


def format_limit_error(what: str, most: int, key: str, advice: str) -> str:
    """The text of a refusal: what there is too much of, how much there may be, and what to do.

    Args:
        what: `this worker has 1024 sessions`.
        key: of the daemon's configuration, which raises the limit.
        advice: what the caller can do.
    """
    return f"{what}, and there may be {most}: {advice}, or raise {key} of the daemon"
