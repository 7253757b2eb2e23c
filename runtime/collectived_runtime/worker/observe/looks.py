"""Looks of group loops at their segments before an answer about them, for ranks act there by themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import partial

from collectived_runtime.engine.loop.group_loop import GroupLoop

LOOK_SECONDS = 0.05  # a group loop that has not looked by then is described as it is known
PAUSE_SECONDS = 0.0005  # between two questions whether all have looked


class LookRequest:
    """Asks group loops to look. One that hangs delays the answer for `LOOK_SECONDS` at most."""

    def __init__(self, group_loops: Iterable[GroupLoop], stacks: bool = False) -> None:
        self._answers: list[GroupLoop] = []  # appended to by their threads
        self._until = time.monotonic() + LOOK_SECONDS
        self._asked = sum([loop.request_look(partial(self._answers.append, loop), stacks) for loop in group_loops])

    @property
    def is_over(self) -> bool:
        """Whether all have looked, or have had their time."""
        return len(self._answers) >= self._asked or time.monotonic() >= self._until


async def look(group_loops: Iterable[GroupLoop], stacks: bool = False) -> None:
    """Have group loops look, and wait until they have, or have had their time.

    Args:
        stacks: ask too where the threads of ranks are that others wait for.
    """
    request = LookRequest(group_loops, stacks)
    while not request.is_over:
        await asyncio.sleep(PAUSE_SECONDS)
