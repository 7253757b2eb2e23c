"""Two memories in which several threads meet, more hostile than the machine at hand is on most days.

Both know the accesses that C11 has: a load (acquire, or `sc`: sequentially consistent), a store (release, or
`relaxed`), and read-modify-write (sequentially consistent, as all in the core are). Every access is one step.

- `StoreBuffers`: x86. A store waits in its thread's buffer until some later step, or until that thread's next
  read-modify-write.
- `WeakMemory`: C11 as far as ARM goes. Every location keeps all values that were ever stored in it; a load may find any
  that its thread does not know to be outdated. A thread learns from what it reads (acquire of a release), and all learn
  from accesses that are sequentially consistent, but of that location alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from random import Random
from typing import Any, Protocol

Location = Hashable
View = dict[Location, int]


class Memory(Protocol):
    """What threads can do with words that they share."""

    def load(self, thread: Hashable, at: Location, *, sc: bool = False, relaxed: bool = False) -> Any: ...
    def store(self, thread: Hashable, at: Location, value: Any, *, relaxed: bool = False) -> None: ...
    def change(self, thread: Hashable, at: Location, function: Callable[[Any], Any]) -> Any:
        """Read-modify-write; returns what was there."""

    def latest(self, at: Location) -> Any:
        """What the kernel, or somebody who looks on, finds there."""

    def drift(self) -> None:
        """Something happens that is nobody's step."""

    def settle(self, thread: Hashable) -> None:
        """All that this thread has stored is seen: it has slept, or has ended."""

    def learn(self, thread: Hashable, of: Hashable) -> None:
        """`thread` hears from the kernel that `of` has ended: it sees what that had seen."""


class StoreBuffers:
    def __init__(self, initial: dict[Location, Any], chance: Random) -> None:
        self._words = dict(initial)
        self._buffers: dict[Hashable, list[tuple[Location, Any]]] = {}
        self._chance = chance

    def load(self, thread: Hashable, at: Location, *, sc: bool = False, relaxed: bool = False) -> Any:
        for where, value in reversed(self._buffers.get(thread, ())):
            if where == at:
                return value
        return self._words[at]

    def store(self, thread: Hashable, at: Location, value: Any, *, relaxed: bool = False) -> None:
        self._buffers.setdefault(thread, []).append((at, value))

    def change(self, thread: Hashable, at: Location, function: Callable[[Any], Any]) -> Any:
        self.settle(thread)
        was = self._words[at]
        self._words[at] = function(was)
        return was

    def latest(self, at: Location) -> Any:
        return self._words[at]

    def drift(self) -> None:
        if self._buffers and self._chance.random() < 0.3:
            thread = self._chance.choice(list(self._buffers))
            at, value = self._buffers[thread].pop(0)
            self._words[at] = value
            if not self._buffers[thread]:
                del self._buffers[thread]

    def settle(self, thread: Hashable) -> None:
        for at, value in self._buffers.pop(thread, ()):
            self._words[at] = value

    def learn(self, thread: Hashable, of: Hashable) -> None:
        pass


class WeakMemory:
    def __init__(self, initial: dict[Location, Any], chance: Random) -> None:
        self._history: dict[Location, list[tuple[Any, View]]] = {at: [(value, {})] for at, value in initial.items()}
        self._views: dict[Hashable, View] = {}
        self._common: View = {}  # what sequentially consistent accesses have seen or stored
        self._chance = chance

    def load(self, thread: Hashable, at: Location, *, sc: bool = False, relaxed: bool = False) -> Any:
        view, history = self._views.setdefault(thread, {}), self._history[at]
        oldest, newest = view.get(at, 0), len(history) - 1
        if sc:
            oldest = max(oldest, self._common.get(at, 0))
        found = newest if self._chance.random() < 0.6 else self._chance.randint(oldest, newest)
        view[at] = found
        if not relaxed:
            _join(view, history[found][1])
        if sc:
            self._common[at] = max(self._common.get(at, 0), found)
        return history[found][0]

    def store(self, thread: Hashable, at: Location, value: Any, *, relaxed: bool = False) -> None:
        view = self._views.setdefault(thread, {})
        view[at] = len(self._history[at])
        self._history[at].append((value, {at: view[at]} if relaxed else dict(view)))

    def change(self, thread: Hashable, at: Location, function: Callable[[Any], Any]) -> Any:
        view, history = self._views.setdefault(thread, {}), self._history[at]
        was, learned = history[-1]
        _join(view, learned)
        view[at] = self._common[at] = len(history)
        history.append((function(was), dict(view)))
        return was

    def latest(self, at: Location) -> Any:
        return self._history[at][-1][0]

    def drift(self) -> None:
        pass

    def settle(self, thread: Hashable) -> None:
        pass

    def learn(self, thread: Hashable, of: Hashable) -> None:
        _join(self._views.setdefault(thread, {}), self._views.get(of, {}))


def _join(view: View, other: View) -> None:
    for at, number in other.items():
        if view.get(at, 0) < number:
            view[at] = number
