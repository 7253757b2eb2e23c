"""Descriptors of this process: as many as it may have, and some kept back so that those who are expected get in.

The kernel gives the lowest number that is free. So the number of a descriptor that has just been made says how many
there are, and no count is needed.
"""

from __future__ import annotations

import os
import resource

TARGET_DESCRIPTORS = 1 << 16  # more would only make what goes through all of them slow
RESERVED_DESCRIPTORS = (
    256  # for what was admitted before: memory, doorbells and links of sessions and groups that are there
)


def raise_limit() -> int:
    """Raise the soft limit of this process as far as it may; the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = TARGET_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(TARGET_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return TARGET_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def has_descriptor_room(limit: int, descriptor: int) -> bool:
    """Whether strangers may still come in, where `descriptor` is the latest: they leave a reserve."""
    return descriptor < limit - min(RESERVED_DESCRIPTORS, limit // 4)


def can_open_descriptor(limit: int) -> bool:
    """The same of one that is made to ask, and closed again."""
    try:
        latest = os.eventfd(0)
    except OSError:
        return False
    os.close(latest)
    return has_descriptor_room(limit, latest)


def compute_connection_limit(wanted: int, available: int, addresses: int) -> int:
    """How many connections each address may have, so that all together take no more descriptors than are available."""
    share = max(1, available // max(1, addresses))
    return min(wanted, share) if wanted else share
