"""Worker memory that this client writes: input arenas, and slots in them for arrays and for staging.

An *arena* is a sealed memfd of the worker, mapped here once. A *slot* is a range of it. A slot is given back when the
last array that looks into it is collected; finalizers run anywhere, so they only append to a deque.
"""

from __future__ import annotations

import math
import os
import select
import socket
import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectived.calls.limit import Limit
from collectived.calls.places import Backing, Place, Stageable
from collectived.calls.turns import LOOK_UP
from collectived.errors import (
    CancelledError,
    CollectiveError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from collectived.shared import door
from collectived.values.leaves import Array
from collectived_proto.errors import error_class
from collectived_proto.local import wire
from collectived_proto.local.slots import Slots

if sys.platform == "linux":
    from collectived_proto.local import arena as shared

FIRST = 2 << 20  # bytes of the first arena; later ones are as large as all before together,
LARGEST = 256 << 20  # but not larger than this, unless one slot needs it
_PAGES = 2 << 20
_PATIENCE = 30.0  # seconds in which a worker hands over an arena: it must fill its pages first


@dataclass(slots=True, eq=False)
class InputArena:
    number: int
    memory: Any  # its mapping
    base: int  # address
    slots: Slots

    @property
    def size(self) -> int:
        return self.slots.size


class Slot:
    """A range of an input arena, given back when collected."""

    __slots__ = ("address", "arena", "offset", "returned")

    def __init__(self, arena: InputArena, offset: int, returned: deque[tuple[InputArena, int]]) -> None:
        self.arena = arena
        self.offset = offset
        self.address = (arena.number, offset)
        self.returned = returned

    def __del__(self) -> None:
        self.returned.append((self.arena, self.offset))


class Staging:
    """A slot for the leaves of one collective, laid out as Prepare said."""

    __slots__ = ("address", "slot", "views")

    def __init__(self, slot: Slot, places: Sequence[Place]) -> None:
        self.slot = slot
        self.address = (slot.address,)
        memory = slot.arena.memory
        self.views: list[Array] = [
            np.ndarray(shape, dtype, memory, slot.offset + offset) for offset, dtype, shape in places
        ]

    def fill(self, arrays: Sequence[Array]) -> None:
        """Copies the leaves there."""
        for view, array in zip(self.views, arrays, strict=True):
            view[...] = array  # a sixth of the time of np.copyto


_Granted = tuple[wire.Kind, int, int, int]  # which kind of arena, its number and size, and a descriptor of it


class SessionSocket:
    """The socket over which input arenas are asked for, and memory is lent. Not thread-safe; its owner has a lock."""

    def __init__(self, sock: socket.socket, worker: str) -> None:
        self.socket = sock
        self._worker = worker
        self._buffer = bytearray(wire.MAX_MESSAGE)
        self._withdrawn = ""  # why nobody waits any more

    def ask(self, size: int, limit: Limit) -> shared.Arena:
        """An arena of at least `size` bytes, mapped.

        Raises:
            UnavailableError: no answer within the limit; one that comes later serves the next who asks.
            CollectiveError: as the worker refused it, or because it is lost.
        """
        number, size, descriptor = self._ask(wire.arena(wire.Kind.ARENA_ASK, 0, size), wire.Kind.ARENA, size, limit)
        try:
            return shared.attach(number, size, descriptor, writable=True)
        except ValueError as error:
            raise self._nonsense(error) from error

    def ask_device(self, index: int, size: int, limit: Limit) -> tuple[int, int, int]:
        """Memory of one of the worker's GPUs: number and size of the arena, and a descriptor.

        Raises:
            UnavailableError, CollectiveError: as `ask`.
        """
        return self._ask(wire.arena(wire.Kind.DEVICE_ASK, index, size), wire.Kind.DEVICE_ARENA, size, limit)

    def lend(self, lent: wire.Lent, limit: Limit) -> wire.Lending:
        """Has the worker open memory of this process's own; what has become of it.

        Raises:
            UnavailableError, CollectiveError: as `ask`.
        """
        self._say(lent.encode(), limit)
        while True:
            answer = self._answer(limit)
            if isinstance(answer, wire.Lending) and answer.identity == lent.identity:
                return answer
            self._unwanted(answer)

    def _ask(self, message: bytes, kind: wire.Kind, size: int, limit: Limit) -> tuple[int, int, int]:
        self._say(message, limit)
        while True:
            answer = self._answer(limit)
            if not isinstance(answer, wire.Lending) and answer[0] is kind and answer[2] >= size:
                return answer[1:]
            self._unwanted(answer)

    def _say(self, message: bytes, limit: Limit) -> None:
        if not door.send(self.socket, message, limit.remaining):
            raise UnavailableError(f"{self._worker} is lost: it does not take messages any more; connect again")

    def _unwanted(self, answer: _Granted | wire.Lending) -> None:
        """What somebody had asked for who has given up."""
        if isinstance(answer, wire.Lending):
            if answer.number:
                self.drop(answer.number)
            return
        os.close(answer[3])
        self.drop(answer[1])

    def greet(self, limit: Limit) -> None:
        """Waits for the worker's word that this socket is the session now.

        Raises:
            UnavailableError: it does not come in time, or the worker hangs up.
            CollectiveError: as the worker refuses it.
        """
        kind, message, descriptor = self._receive(limit, "its session socket")
        if descriptor >= 0:
            os.close(descriptor)
        if kind is wire.Kind.REFUSED:
            raise self._refusal(message)
        if kind is not wire.Kind.PONG:
            raise InternalError(f"{self._worker} began a session socket with {kind.name}")

    def _answer(self, limit: Limit) -> _Granted | wire.Lending:
        kind, message, descriptor = self._receive(limit, "a request for memory")
        try:
            if kind in (wire.Kind.DEVICE_OPENED, wire.Kind.NOT_OPENED) and descriptor < 0:
                return wire.parse_lending(message)
            if kind is wire.Kind.REFUSED:
                raise self._refusal(message)
            if kind not in (wire.Kind.ARENA, wire.Kind.DEVICE_ARENA) or descriptor < 0:
                raise InternalError(f"{self._worker} answered a request for memory with {kind.name}")
            return kind, *wire.parse_arena(message), descriptor
        except wire.Malformed as error:
            raise self._nonsense(error) from error

    def _refusal(self, message: bytes) -> CollectiveError:
        try:
            code, text = wire.parse_refused(message)
        except wire.Malformed as error:
            return self._nonsense(error)
        return error_class(code)(text)

    def _receive(self, limit: Limit, question: str) -> tuple[wire.Kind, bytes, int]:
        waiting = select.poll()
        try:
            waiting.register(self.socket, select.POLLIN)
        except ValueError:  # closed already
            raise CancelledError(self._withdrawn) from None
        while not waiting.poll(min(LOOK_UP, limit.deadline.remaining()) * 1000):
            if self._withdrawn:
                raise CancelledError(self._withdrawn)
            if not limit.deadline.remaining():
                raise UnavailableError(
                    f"{self._worker} has not answered {question} within {limit.asked:g} s; is it stopped?"
                )
        message, descriptor = door.receive(self.socket, self._buffer)
        if not message:
            raise UnavailableError(f"{self._worker} is lost: it has closed the session; connect again")
        try:
            return wire.kind_of(message), message, descriptor
        except wire.Malformed as error:
            raise self._nonsense(error) from error

    def _nonsense(self, error: Exception) -> InternalError:
        return InternalError(f"{self._worker} sent something unexpected ({error}); connect again")

    def drop(self, number: int) -> None:
        """Gives an arena back, unless the worker is too far behind to be told: then with the session."""
        door.send(self.socket, wire.arena(wire.Kind.ARENA_DROP, number, 0), 0.0)

    def withdraw(self, why: str) -> None:
        """The session is being closed: who waits for an answer gets a CancelledError."""
        self._withdrawn = why

    def close(self) -> None:
        self.socket.close()


class Memory:
    """All input arenas of a session. Thread-safe."""

    def __init__(self, source: SessionSocket) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._map: tuple[tuple[int, ...], tuple[InputArena, ...]] = ((), ())  # by address; replaced, never changed
        self._returned: deque[tuple[InputArena, int]] = deque()
        self._spares: dict[Stageable, Any] = {}
        self._retired: list[object] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array in worker memory, row-major."""
        nbytes = math.prod(shape) * dtype.itemsize
        slot = self._take(nbytes)
        backing = Backing((max(1, nbytes),), np.uint8, slot.arena.memory, slot.offset)
        backing.slot = slot
        return np.ndarray(shape, dtype, backing)

    def locate(self, array: Array) -> tuple[int, int] | None:
        """(arena, byte offset) of an array whose elements lie in worker memory side by side, else None."""
        base = array.base
        if type(base) is Backing and array.nbytes == base.nbytes:  # it is the whole of an array that `empty` made
            slot = base.slot
            if type(slot) is Slot and slot.returned is self._returned:
                return slot.address
        flags = array.flags
        if flags.owndata or not (flags.c_contiguous and flags.aligned):
            return None
        return self._find(array.__array_interface__["data"][0], array.nbytes)

    def _find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """(arena, byte offset) of those bytes."""
        bases, arenas = self._map
        index = bisect_right(bases, address) - 1
        if index < 0:
            return None
        arena = arenas[index]
        offset = address - arena.base
        return (arena.number, offset) if offset + nbytes <= arena.size else None

    def stage(self, prepared: Stageable, patience: float = _PATIENCE) -> Any:
        """A staging slot for a collective: the one that it used last, or a new one within so many seconds."""
        staging = self._spares.pop(prepared, None)
        if staging is None:
            staging = Staging(self._take(prepared.layout.staging_bytes, patience), prepared.staging_places)
        return staging

    def keep(self, prepared: Stageable, staging: Staging) -> None:
        """The worker has read this slot; it waits for the next collective of its kind, or until memory is short."""
        if prepared.current:
            self._spares[prepared] = staging

    def retire(self, staging: object, arrays: Sequence[Array]) -> None:
        """The worker may still be reading these: their slots are never used again."""
        self._retired.append((staging, arrays))

    def outdated(self, prepared: Stageable) -> None:
        """No more calls of it will come."""
        prepared.current = False
        self._spares.pop(prepared, None)

    def _take(self, nbytes: int, patience: float = _PATIENCE) -> Slot:
        limit = Limit.of(min(patience, _PATIENCE))
        if not self._lock.acquire(timeout=limit.remaining):
            raise UnavailableError(f"another thread has waited for memory of the worker for {limit.asked:g} s")
        try:
            slot = self._fit(nbytes)
            if slot is None and self._spares:
                self._spares.clear()
                slot = self._fit(nbytes)
            if slot is None:
                self._grow(nbytes, limit)
                slot = self._fit(nbytes)
            if slot is None:
                raise InternalError(f"{nbytes} bytes do not fit into an arena made for them")
            return slot
        finally:
            self._lock.release()

    def _fit(self, nbytes: int) -> Slot | None:
        while self._returned:
            arena, offset = self._returned.popleft()
            arena.slots.give(offset)
        for arena in self._map[1]:
            taken = arena.slots.take(nbytes)
            if taken is not None:
                return Slot(arena, taken, self._returned)
        return None

    def _grow(self, nbytes: int, limit: Limit) -> None:
        least = max(1, -(-nbytes // _PAGES)) * _PAGES
        total = sum(arena.size for arena in self._map[1])
        try:
            self._add(self._ask(max(least, FIRST, min(total, LARGEST)), limit))
        except ResourceExhaustedError:
            self._drop_unused()
            self._add(self._ask(least, limit))

    def _ask(self, size: int, limit: Limit) -> InputArena:
        mapped = self.source.ask(size, limit)
        if mapped.memory is None:
            raise InternalError(f"arena {mapped.number} came without memory")
        base = np.ndarray((mapped.size,), np.uint8, mapped.memory).__array_interface__["data"][0]
        return InputArena(mapped.number, mapped.memory, base, Slots(mapped.size))

    def _add(self, arena: InputArena) -> None:
        self._arrange([*self._map[1], arena])

    def _drop_unused(self) -> None:
        for arena in self._map[1]:
            if not arena.slots.used:
                self.source.drop(arena.number)
        self._arrange([arena for arena in self._map[1] if arena.slots.used])

    def _arrange(self, arenas: list[InputArena]) -> None:
        arenas.sort(key=lambda arena: arena.base)
        self._map = (tuple(arena.base for arena in arenas), tuple(arenas))

    def forget(self) -> None:
        """Lets go of every arena; a mapping ends with the last array that looks into it."""
        self._map = ((), ())
        self._spares.clear()
        self._retired.clear()
        self._returned.clear()
