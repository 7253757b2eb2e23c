"""Threads that are stepped in random order over a memory, with the kernel's futex, deaths and stops.

A thread is a generator that yields its next access to shared memory; the machine carries it out and sends back what was
found. Its name is the worker's, or its seat and what it does there. There is no clock: who sleeps is woken by somebody,
or a wake-up was lost. Only where a process is stopped, or the worker is gone, sleepers look up by themselves, as those
of the core do every 50 ms.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Hashable, Iterator
from random import Random
from typing import Any

from tests.native.memory_models import Memory

WORKER = "worker"

Step = tuple[Any, ...]
Thread = Generator[Step, Any, Any]


class Violation(Exception):
    """What must never happen has happened."""


class Machine:
    def __init__(self, memory: Memory, chance: Random) -> None:
        self.memory, self.chance = memory, chance
        self.threads: dict[Hashable, Thread] = {}
        self.results: dict[Hashable, Any] = {}
        self.asleep: dict[Hashable, Hashable] = {}
        self.stopped: int | None = None
        self.worker_gone = False

    def check(self, at: Hashable, before: Any) -> None:
        """A word was changed: raise `Violation` where that must not be."""

    def execute(self, thread: Hashable, step: Step) -> Any:
        """Carry out one access."""
        kind, at, value = (*step, None, None)[:3]
        if kind in ("load", "load_sc", "load_relaxed"):
            return self.memory.load(thread, at, sc=kind == "load_sc", relaxed=kind == "load_relaxed")
        if kind == "change":
            found = self.memory.change(thread, at, value)
            self.check(at, found)
            return found
        if kind == "sleep":
            self.memory.settle(thread)
            if self.memory.latest(at) == value:
                self.asleep[thread] = at
        elif kind == "wake":
            for sleeper in [one for one, where in self.asleep.items() if where == at]:
                del self.asleep[sleeper]
        else:
            self.memory.store(thread, at, value, relaxed=kind == "store_relaxed")
        return None

    def ready(self) -> list[Hashable]:
        return [one for one in self.threads if one not in self.asleep and not self.is_stopped(one)]

    def is_stopped(self, thread: Hashable) -> bool:
        return self.stopped is not None and isinstance(thread, tuple) and thread[0] == self.stopped

    def run(self, misfortune: Iterator[None], most: int = 60_000) -> None:
        """Step threads until all have ended. `misfortune` goes one step on before each of theirs."""
        pending: dict[Hashable, Step] = {}
        favourite: Hashable = None
        for _ in range(most):
            next(misfortune, None)
            for thread in self.threads.keys() - pending.keys():
                self.resume(thread, None, pending)
            ready = self.ready()
            if not ready:
                if not self.threads:
                    return
                if self.stopped is None and not self.worker_gone:
                    raise Violation(f"nobody wakes {self.asleep}; decided is {self.memory.latest('decided')}")
                self.asleep.clear()  # 50 ms are over
                continue
            self.memory.drift()
            if favourite not in ready or self.chance.random() < 0.15:
                favourite = self.chance.choice(ready)
            self.resume(favourite, self.execute(favourite, pending.pop(favourite)), pending)
        raise Violation(f"no end after {most} steps; decided is {self.memory.latest('decided')}")

    def resume(self, thread: Hashable, found: Any, pending: dict[Hashable, Step]) -> None:
        """Run a thread up to its next access."""
        try:
            pending[thread] = self.threads[thread].send(found)
        except StopIteration as end:
            self.memory.settle(thread)
            self.results[thread] = end.value
            del self.threads[thread]

    def has_begun(self, thread: Hashable) -> bool:
        return inspect.getgeneratorstate(self.threads[thread]) == inspect.GEN_SUSPENDED

    def place_of(self, thread: Hashable) -> tuple[str, int]:
        """The step before which a thread is: function and line."""
        program: Any = self.threads[thread]
        while program.gi_yieldfrom is not None:
            program = program.gi_yieldfrom
        return (program.gi_code.co_name, program.gi_frame.f_lineno)

    def kill(self, seat: int) -> None:
        """All threads of that seat's process are gone; what they had stored is seen."""
        for thread in [one for one in self.threads if isinstance(one, tuple) and one[0] == seat]:
            self.memory.settle(thread)
            self.memory.learn(WORKER, thread)
            self.asleep.pop(thread, None)
            self.threads.pop(thread).close()
