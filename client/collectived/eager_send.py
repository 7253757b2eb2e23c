"""Sends that end as they start most often, so that there need not be a Work for them."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

from collectived import operations
from collectived.calls.channel import NOT_REPEATED
from collectived.group import Group
from collectived.thread_stacks import OWN_THREADS
from collectived.work import Work


def begin_send(group: Group, value: Any, to: int, tag: int) -> Work[None] | None:
    """Send an array as `Group.send(async_op=True)` does, but wait up to 20 ms for its end.

    Returns:
        None: it has ended well. Else a `Work`.

    Raises:
        CollectiveError: it could not start.
    """
    operation, frame = operations.send(to, tag, group.size), sys._getframe(1)
    group._check_usable()
    channel = group._channel
    try:
        result = channel.repeat(operation, value, None, frame)
        if result is None:
            return None
        if result is not NOT_REPEATED:
            return _go_on(
                Work([channel.resume(result, operation, value, None, None)], channel, group._unobserved_errors)
            )
    except BaseException as error:
        channel.abort_by_error(error)
        raise
    work: Work[None] = group._start(operation, value, None, None, True)
    if work._call.complete and work._call.verdict is None:
        channel.remember(work._call, operation, value, frame)
        return None
    return work


def _go_on(work: Work[None]) -> Work[None]:
    """Have a thread wait: the native core goes on with it only while one does."""
    thread = threading.Thread(target=_wait_for, args=[work], name=f"{OWN_THREADS}send", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there can be no more threads
        _wait_for(work)
    return work


def _wait_for(work: Work[None]) -> None:
    with contextlib.suppress(Exception):  # the work says so where it is asked
        work._channel.wait(work._call)
