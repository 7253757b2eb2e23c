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

from collectived.calls.buffers import Backing, LeafLocation, Stageable
from collectived.calls.leader_follower import SIGNAL_CHECK_INTERVAL
from collectived.calls.local_failure import descriptor_lost
from collectived.calls.timeout import Timeout
from collectived.errors import (
    CancelledError,
    CollectiveError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from collectived.shared import seqpacket
from collectived.values.copying import copy_into
from collectived.values.leaves import Array
from collectived_proto.errors import error_class
from collectived_proto.ipc import messages
from collectived_proto.ipc.free_list import FreeList

if sys.platform == "linux":
    from collectived_proto.ipc import arena as shared

FIRST_ARENA_BYTES = 2 << 20  # bytes of the first arena; later ones are as large as all before together,
MAX_ARENA_BYTES = 256 << 20  # but not larger than this, unless one slot needs it
_PAGE_BYTES = 2 << 20
_ARENA_TIMEOUT = 30.0  # seconds in which a worker hands over an arena: it must fill its pages first


@dataclass(slots=True, eq=False)
class InputArena:
    number: int
    memory: Any  # its mapping
    base: int  # address
    free_list: FreeList

    @property
    def size(self) -> int:
        return self.free_list.size


class InputSlot:
    """A range of an input arena, given back when collected."""

    __slots__ = ("address", "arena", "offset", "free_queue")

    def __init__(self, arena: InputArena, offset: int, returned: deque[tuple[InputArena, int]]) -> None:
        self.arena = arena
        self.offset = offset
        self.address = (arena.number, offset)
        self.free_queue = returned

    def __del__(self) -> None:
        self.free_queue.append((self.arena, self.offset))


class SharedStaging:
    """A slot for the leaves of one collective, laid out as Prepare said."""

    __slots__ = ("address", "slot", "views")

    def __init__(self, slot: InputSlot, places: Sequence[LeafLocation]) -> None:
        self.slot = slot
        self.address = (slot.address,)
        memory = slot.arena.memory
        self.views: list[Array] = [
            np.ndarray(shape, dtype, memory, slot.offset + offset) for offset, dtype, shape in places
        ]

    def fill(self, arrays: Sequence[Array]) -> None:
        for view, array in zip(self.views, arrays, strict=True):
            copy_into(view, array)

    def fill_without(self, arrays: Sequence[Array], unread: Sequence[range]) -> None:
        """The same without some rows of each leaf, in whose place is what lay there before."""
        for view, array, rows in zip(self.views, arrays, unread, strict=True):
            for part in slice(rows.start), slice(rows.stop, None):
                copy_into(np.atleast_1d(view)[part], np.atleast_1d(array)[part])


_ArenaGrant = tuple[
    messages.MessageType, int, int, int
]  # which kind of arena, its number and size, and a descriptor of it


class SessionSocket:
    """The socket over which input arenas are asked for, and memory is lent. Not thread-safe; its owner has a lock."""

    def __init__(self, sock: socket.socket, worker: str) -> None:
        self.socket = sock
        self._worker = worker
        self._buffer = bytearray(messages.MAX_MESSAGE)
        self._cancel_reason = ""  # why threads wait no longer

    def request_arena(self, size: int, limit: Timeout) -> shared.Arena:
        """An arena of at least `size` bytes, mapped.

        Raises:
            UnavailableError: no answer within the limit; one that comes later serves the next caller.
            CollectiveError: as the worker refused it, or because it is lost.
        """
        number, size, descriptor = self._request_arena(
            messages.encode_arena(messages.MessageType.ARENA_REQUEST, 0, size), messages.MessageType.ARENA, size, limit
        )
        try:
            return shared.attach(number, size, descriptor, writable=True)
        except ValueError as error:
            raise self._protocol_error(error) from error
        except (OSError, MemoryError):  # of this process: the worker need not keep it
            self.release_arena(number)
            raise

    def request_device_arena(self, index: int, size: int, limit: Timeout) -> tuple[int, int, int]:
        """Memory of one of the worker's GPUs: number and size of the arena, and a descriptor.

        Raises:
            UnavailableError, CollectiveError: as `_request_arena`.
        """
        return self._request_arena(
            messages.encode_arena(messages.MessageType.DEVICE_REQUEST, index, size),
            messages.MessageType.DEVICE_ARENA,
            size,
            limit,
        )

    def export_allocation(self, lent: messages.IpcOpen, limit: Timeout) -> messages.IpcOpenResult:
        """Have the worker open memory of this process, and return the outcome.

        Raises:
            UnavailableError, CollectiveError: as `_request_arena`.
        """
        self._send(lent.encode(), limit)
        while True:
            answer = self._receive_reply(limit)
            if isinstance(answer, messages.IpcOpenResult) and answer.buffer_id == lent.buffer_id:
                return answer
            self._release_stale_reply(answer)

    def _request_arena(
        self, message: bytes, kind: messages.MessageType, size: int, limit: Timeout
    ) -> tuple[int, int, int]:
        self._send(message, limit)
        while True:
            answer = self._receive_reply(limit)
            if not isinstance(answer, messages.IpcOpenResult) and answer[0] is kind and answer[2] >= size:
                return answer[1:]
            self._release_stale_reply(answer)

    def _send(self, message: bytes, limit: Timeout) -> None:
        if not seqpacket.send(self.socket, message, limit.remaining):
            raise UnavailableError(f"{self._worker} is lost: it does not take messages any more; connect again")

    def _release_stale_reply(self, answer: _ArenaGrant | messages.IpcOpenResult) -> None:
        """Release the memory in a reply for a caller that has given up."""
        if isinstance(answer, messages.IpcOpenResult):
            if answer.number:
                self.release_arena(answer.number)
            return
        os.close(answer[3])
        self.release_arena(answer[1])

    def await_attached(self, limit: Timeout) -> None:
        """Waits for the worker's word that this socket is the session now.

        Raises:
            UnavailableError: it does not come in time, or the worker hangs up.
            CollectiveError: as the worker refuses it.
        """
        kind, message, descriptor = self._receive(limit, "its session socket")
        if descriptor >= 0:
            os.close(descriptor)
        if kind is messages.MessageType.REFUSED:
            raise self._refusal_error(message)
        if kind is not messages.MessageType.PONG:
            raise InternalError(f"{self._worker} began a session socket with {kind.name}")

    def _receive_reply(self, limit: Timeout) -> _ArenaGrant | messages.IpcOpenResult:
        kind, message, descriptor = self._receive(limit, "a request for memory")
        try:
            if descriptor == seqpacket.DESCRIPTOR_LOST:
                self.release_arena(messages.parse_arena(message)[0])
                raise descriptor_lost()
            if kind in (messages.MessageType.DEVICE_OPENED, messages.MessageType.NOT_OPENED) and descriptor < 0:
                return messages.parse_ipc_open_result(message)
            if kind is messages.MessageType.REFUSED:
                raise self._refusal_error(message)
            if kind not in (messages.MessageType.ARENA, messages.MessageType.DEVICE_ARENA) or descriptor < 0:
                raise InternalError(f"{self._worker} answered a request for memory with {kind.name}")
            return kind, *messages.parse_arena(message), descriptor
        except messages.MalformedMessage as error:
            raise self._protocol_error(error) from error

    def _refusal_error(self, message: bytes) -> CollectiveError:
        try:
            code, text = messages.parse_refused(message)
        except messages.MalformedMessage as error:
            return self._protocol_error(error)
        return error_class(code)(text)

    def _receive(self, limit: Timeout, question: str) -> tuple[messages.MessageType, bytes, int]:
        waiting = select.poll()
        try:
            waiting.register(self.socket, select.POLLIN)
        except ValueError:  # closed already
            raise CancelledError(self._cancel_reason) from None
        while not waiting.poll(min(SIGNAL_CHECK_INTERVAL, limit.deadline.remaining()) * 1000):
            if self._cancel_reason:
                raise CancelledError(self._cancel_reason)
            if not limit.deadline.remaining():
                raise UnavailableError(
                    f"{self._worker} has not answered {question} within {limit.requested_seconds:g} s; is it stopped?"
                )
        message, descriptor = seqpacket.receive(self.socket, self._buffer)
        if not message:
            raise UnavailableError(f"{self._worker} is lost: it has closed the session; connect again")
        try:
            return messages.parse_type(message), message, descriptor
        except messages.MalformedMessage as error:
            raise self._protocol_error(error) from error

    def _protocol_error(self, error: Exception) -> InternalError:
        return InternalError(f"{self._worker} sent something unexpected ({error}); connect again")

    def release_arena(self, number: int) -> None:
        """Gives an arena back, unless the worker is too far behind to be told: then with the session."""
        seqpacket.send(self.socket, messages.encode_arena(messages.MessageType.ARENA_DROP, number, 0), 0.0)

    def cancel(self, why: str) -> None:
        """End all waits with CancelledError, because the session is being closed."""
        self._cancel_reason = why

    def close(self) -> None:
        self.socket.close()


class SharedMemory:
    """All input arenas of a session. Thread-safe."""

    def __init__(self, source: SessionSocket) -> None:
        self.session_socket = source
        self._lock = threading.Lock()
        self._arenas_by_address: tuple[tuple[int, ...], tuple[InputArena, ...]] = (
            (),
            (),
        )  # by address; replaced, never changed
        self._free_queue: deque[tuple[InputArena, int]] = deque()
        self._spare_staging: dict[Stageable, Any] = {}
        self._retired: dict[int, object] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array in worker memory, row-major."""
        nbytes = math.prod(shape) * dtype.itemsize
        slot = self._allocate(nbytes)
        backing = Backing((max(1, nbytes),), np.uint8, slot.arena.memory, slot.offset)
        backing.slot = slot
        return np.ndarray(shape, dtype, backing)

    def locate(self, array: Array) -> tuple[int, int] | None:
        """(arena, byte offset) of an array whose elements lie in worker memory side by side, else None."""
        base = array.base
        if type(base) is Backing and array.nbytes == base.nbytes:  # it is the whole of an array that `empty` made
            slot = base.slot
            if type(slot) is InputSlot and slot.free_queue is self._free_queue:
                return slot.address
        flags = array.flags
        if flags.owndata or not (flags.c_contiguous and flags.aligned):
            return None
        return self._find(array.__array_interface__["data"][0], array.nbytes)

    def _find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return (arena, byte offset) of those bytes."""
        bases, arenas = self._arenas_by_address
        index = bisect_right(bases, address) - 1
        if index < 0:
            return None
        arena = arenas[index]
        offset = address - arena.base
        return (arena.number, offset) if offset + nbytes <= arena.size else None

    def acquire_staging(self, prepared: Stageable, patience: float = _ARENA_TIMEOUT) -> Any:
        """A staging slot for a collective: the one that it used last, or a new one within so many seconds."""
        staging = self._spare_staging.pop(prepared, None)
        if staging is None:
            staging = SharedStaging(self._allocate(prepared.layout.staging_bytes, patience), prepared.staging_locations)
        return staging

    def release_staging(self, prepared: Stageable, staging: SharedStaging) -> None:
        """The worker has read this slot; it waits for the next collective of its kind, or until memory is short."""
        if prepared.is_cached:
            self._spare_staging[prepared] = staging

    def retire(self, staging: object, arrays: Sequence[Array]) -> object:
        """The worker may still be reading these: their slots are used again only if what is returned is restored."""
        retired = staging, arrays
        self._retired[id(retired)] = retired
        return retired

    def release_retired(self, retired: object) -> None:
        """Let go of retired arrays. Their slots are free when no other object holds them."""
        self._retired.pop(id(retired), None)

    def evict(self, prepared: Stageable) -> None:
        prepared.is_cached = False
        self._spare_staging.pop(prepared, None)

    def _allocate(self, nbytes: int, patience: float = _ARENA_TIMEOUT) -> InputSlot:
        limit = Timeout.of(min(patience, _ARENA_TIMEOUT))
        held = False
        try:
            held = self._lock.acquire(timeout=limit.remaining)
            if not held:
                raise UnavailableError(
                    f"another thread has waited for memory of the worker for {limit.requested_seconds:g} s"
                )
            slot = self._try_allocate(nbytes)
            if slot is None and self._spare_staging:
                self._spare_staging.clear()
                slot = self._try_allocate(nbytes)
            if slot is None:
                self._grow(nbytes, limit)
                slot = self._try_allocate(nbytes)
            if slot is None:
                raise InternalError(f"{nbytes} bytes do not fit into shared memory made for them")
            return slot
        finally:
            if held:
                self._lock.release()

    def release_unused(self) -> None:
        """Give back what is only kept for later, unless another thread is at it."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._spare_staging.clear()
            self._collect_freed()
            self._drop_unused()
        finally:
            self._lock.release()

    def _collect_freed(self) -> None:
        while self._free_queue:
            arena, offset = self._free_queue.popleft()
            arena.free_list.free(offset)

    def _try_allocate(self, nbytes: int) -> InputSlot | None:
        self._collect_freed()
        for arena in self._arenas_by_address[1]:
            taken = arena.free_list.allocate(nbytes)
            if taken is not None:
                return InputSlot(arena, taken, self._free_queue)
        return None

    def _grow(self, nbytes: int, limit: Timeout) -> None:
        least = max(1, -(-nbytes // _PAGE_BYTES)) * _PAGE_BYTES
        total = sum(arena.size for arena in self._arenas_by_address[1])
        try:
            self._add(self._request_arena(max(least, FIRST_ARENA_BYTES, min(total, MAX_ARENA_BYTES)), limit))
        except ResourceExhaustedError:
            self._drop_unused()
            self._add(self._request_arena(least, limit))

    def _request_arena(self, size: int, limit: Timeout) -> InputArena:
        mapped = self.session_socket.request_arena(size, limit)
        if mapped.memory is None:
            raise InternalError(f"shared memory {mapped.number} came without memory")
        base = np.ndarray((mapped.size,), np.uint8, mapped.memory).__array_interface__["data"][0]
        return InputArena(mapped.number, mapped.memory, base, FreeList(mapped.size))

    def _add(self, arena: InputArena) -> None:
        self._set_arenas([*self._arenas_by_address[1], arena])

    def _drop_unused(self) -> None:
        arenas = self._arenas_by_address[1]
        self._set_arenas([arena for arena in arenas if not arena.free_list.is_unused])
        for arena in arenas:
            if arena.free_list.is_unused:  # no longer found, so no thread takes a slot of it
                self.session_socket.release_arena(arena.number)

    def _set_arenas(self, arenas: list[InputArena]) -> None:
        arenas.sort(key=lambda arena: arena.base)
        self._arenas_by_address = (tuple(arena.base for arena in arenas), tuple(arenas))

    def clear(self) -> None:
        """Lets go of every arena; a mapping ends with the last array that looks into it."""
        self._arenas_by_address = ((), ())
        self._spare_staging.clear()
        self._retired.clear()
        self._free_queue.clear()
