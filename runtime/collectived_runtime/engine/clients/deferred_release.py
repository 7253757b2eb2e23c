"""Memory that GPUs still use for instances that have ended: that cannot be stopped, and no thread waits for it.

Its ranks get the end at once, marked that their memory is in use, and another message when it is not any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from collectived_proto.ipc import messages
from collectived_runtime.engine.clients.local_rank import LocalRank

InstanceId = tuple[int, int]  # generation and instance


class StoppedTask(Protocol):
    """A task that was stopped. It wakes the group loop when it `has_ended`: no GPU uses its memory any more."""

    @property
    def has_ended(self) -> bool: ...


class DeferredReleases:
    """Keeps the memory of stopped tasks until GPUs have ended them, and then notifies the ranks whose memory it is."""

    def __init__(self, send: Callable[[LocalRank, bytes], object]) -> None:
        self._send = send
        self._tasks: dict[InstanceId, list[StoppedTask]] = {}
        self._waiting_ranks: dict[InstanceId, dict[int, LocalRank]] = {}  # by rank

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def add(self, number: InstanceId, task: StoppedTask) -> None:
        self._tasks.setdefault(number, []).append(task)

    def register_if_in_use(self, number: InstanceId, local_rank: LocalRank) -> bool:
        """Whether the memory of a rank that took part may still be in use; then a message says when it is free."""
        if all(task.has_ended for task in self._tasks.get(number, ())):
            return False
        self._waiting_ranks.setdefault(number, {})[local_rank.rank] = local_rank
        return True

    def is_memory_in_use(self, local_rank: LocalRank) -> bool:
        """Whether memory is still in use of a rank that had such a message."""
        return any(local_rank.rank in local_ranks for local_ranks in self._waiting_ranks.values())

    def poll(self) -> None:
        """Notify ranks whose memory is in use no longer."""
        for number, tasks in list(self._tasks.items()):
            if all(task.has_ended for task in tasks):
                del self._tasks[number]
                for local_rank in self._waiting_ranks.pop(number, {}).values():
                    self._send(local_rank, messages.encode_freed(*number))
