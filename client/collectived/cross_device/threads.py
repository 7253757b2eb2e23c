"""One function in several threads at once, waited for in a way that Ctrl-C ends."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from collectived.calls.leader_follower import SIGNAL_CHECK_INTERVAL


def run_in_threads(count: int, body: Callable[[int], Any], name: str) -> tuple[list[Any], list[BaseException]]:
    """Calls `body(0)` to `body(count - 1)`, each in a thread of its own, with the caller's context variables.

    Where the wait is interrupted the threads go on; they do not keep the interpreter from ending.

    Returns:
        What each returned, None for those that raised; what was raised, in order of time.
    """
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            results[number] = body(number)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(one, number), name=f"{name}-{number}", daemon=True
        )
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(SIGNAL_CHECK_INTERVAL)
    return results, errors
