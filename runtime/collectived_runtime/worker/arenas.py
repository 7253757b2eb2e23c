"""The memory of one session: what its client asks for, and what it lends of its own on GPUs.

Asks are granted or refused in their order. Everything here runs in the worker's event loop, except `memory`, which
lanes call.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from collectived_proto.devices import DeviceName
from collectived_proto.errors import Code
from collectived_proto.local import wire
from collectived_proto.local.arena import Arena
from collectived_runtime.device.cuda.driver import CudaError
from collectived_runtime.device.gpus import DeviceArena, Gpu, NotCleared
from collectived_runtime.engine.results import Budget, Exhausted, new_arena, next_number
from collectived_runtime.engine.seat import Bytes
from collectived_runtime.limits.descriptors import room
from collectived_runtime.limits.refusals import Limit, Refusals

MOST_ASKED = 64  # arenas of one session that it waits for
MOST_ARENAS = 512  # of one session; each takes a descriptor
AT_ONCE = 1 << 20  # bytes of an arena that take less than a millisecond
_WORKING = ThreadPoolExecutor(2, "collectived-arenas")  # of the host; its threads start when they are first needed


class Arenas:
    """
    Args:
        budget: of shared memory. gpus: the worker's, with what the session may have of the memory of each; it may
            use those among `devices`.
        descriptors: that this process may have.
        openings: allocations of its client's own that may be open at a time, on each GPU.
        send: sends a message, with a descriptor or -1. ended: whether the session has.
    """

    def __init__(
        self,
        budget: Budget,
        gpus: Mapping[Gpu, Budget],
        devices: Sequence[DeviceName],
        refusals: Refusals,
        descriptors: int,
        openings: int,
        send: Callable[[bytes, int], None],
        ended: Callable[[], bool],
    ) -> None:
        self._budget = budget
        self._gpus = gpus
        self._devices = devices
        self._refusals = refusals
        self._descriptors = descriptors
        self._openings = openings
        self._send = send
        self._ended = ended
        self._arenas: dict[int, Arena | DeviceArena] = {}
        self._asked: deque[Callable[[], Awaitable[None]]] = deque()
        self.granting: asyncio.Task[None] | None = None

    def memory(self, arena: int, offset: int, length: int) -> Bytes:
        """Those bytes of the client's memory; raises wire.Malformed where they are not all its own."""
        known = self._arenas.get(arena)
        if known is None:
            raise wire.Malformed(f"an address in arena {arena}, which is not of this session")
        if offset + length > known.size:
            raise wire.Malformed(f"bytes {offset} to {offset + length} of arena {arena}, which has {known.size}")
        try:
            if isinstance(known, DeviceArena):
                return known.region(offset, length)
            return known.stretch(offset, length)
        except ValueError:  # dropped just now, in the other thread
            raise wire.Malformed(f"an address in arena {arena}, which is being given back") from None

    @property
    def host_bytes(self) -> int:
        return sum(arena.size for arena in list(self._arenas.values()) if isinstance(arena, Arena))

    def ask(self, size: int) -> None:
        """The client wants an arena. All asks raise wire.Malformed where too many are waiting."""
        self._ask(partial(self._grant, size))

    def ask_on(self, index: int, size: int) -> None:
        """It wants one in the memory of a GPU."""
        self._ask(partial(self._grant_on, index, size))

    def lend(self, lent: wire.Lent) -> None:
        """It lends memory of its own on a GPU."""
        self._ask(partial(self._open, lent))

    def drop(self, number: int) -> None:
        """It needs an arena no longer; whoever looks into it keeps it."""
        arena = self._arenas.pop(number, None)
        if arena is not None:
            self._let_go_of(arena)

    def drop_all(self) -> None:
        for number in list(self._arenas):
            self.drop(number)

    def _ask(self, grant: Callable[[], Awaitable[None]]) -> None:
        if len(self._asked) >= MOST_ASKED:
            raise wire.Malformed(f"more than {MOST_ASKED} arenas asked for at once")
        self._asked.append(grant)
        if self.granting is None:
            self.granting = asyncio.get_running_loop().create_task(self._grant_all())

    async def _grant_all(self) -> None:
        try:
            while self._asked and not self._ended():
                await self._asked.popleft()()
        finally:
            self.granting = None

    async def _grant(self, size: int) -> None:
        """Filling pages with zeros takes the kernel long: large arenas come into being beside the event loop."""
        if self._full():
            return
        try:
            self._budget.take(size)
        except Exhausted as error:
            self._refuse(str(error))
            return
        arena: Arena | None = None
        try:
            arena = new_arena(size, readers_only=False)
            if not room(self._descriptors, arena.descriptor):
                self._refusals.limit(Limit.DESCRIPTORS)
                raise OSError(errno.EMFILE, "this worker has nearly no descriptors left; raise its LimitNOFILE")
            if size <= AT_ONCE:
                arena.commit(size)
            else:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(_WORKING, arena.commit, size, lambda: not self._ended())
        except (OSError, ValueError, OverflowError) as error:
            if arena is not None:
                arena.close()
            self._budget.give(size)
            if not self._ended():
                self._refuse(f"{size} bytes of shared memory: {error}")
            return
        if self._ended():  # meanwhile
            arena.close()
            self._budget.give(size)
            return
        self._arenas[arena.number] = arena
        self._send(wire.arena(wire.Kind.ARENA, arena.number, size), arena.descriptor)

    async def _grant_on(self, index: int, size: int) -> None:
        """Memory of a GPU; its driver takes milliseconds, beside the event loop."""
        gpu = self._gpu(index)
        if gpu is None:
            self._send(wire.refused(Code.NOT_FOUND, f"this worker has no device GPU:{index}"), -1)
            return
        if self._full():
            return
        budget = self._gpus[gpu]
        try:
            budget.take(size)
        except Exhausted as error:
            self._refuse(str(error))
            return
        try:
            loop = asyncio.get_running_loop()
            freed = partial(budget.give, size)
            arena = await loop.run_in_executor(gpu.beside, gpu.arena, next_number(), size, freed)
        except CudaError as error:
            if not isinstance(error, NotCleared):  # whose memory is still taken
                budget.give(size)
            if not self._ended():
                self._refuse(f"{size} bytes of GPU:{index}: {error}")
            return
        budget.give(size)
        budget.add(arena.size)  # whole pages
        if self._ended():  # meanwhile
            self._let_go_of(arena)
            return
        self._arenas[arena.number] = arena
        self._send(wire.arena(wire.Kind.DEVICE_ARENA, arena.number, arena.size), arena.descriptor)

    async def _open(self, lent: wire.Lent) -> None:
        """An allocation of the client's: where it cannot be opened the client copies, and nobody else is concerned."""
        gpu = self._gpu(lent.gpu)
        if gpu is None:
            self._not_opened(lent, f"this worker has no device GPU:{lent.gpu}")
            return
        there = [arena for arena in self._arenas.values() if isinstance(arena, DeviceArena) and arena.gpu is gpu]
        if sum(arena.lent for arena in there) >= self._openings:
            self._refusals.limit(Limit.SESSION_OPENINGS)
            self._not_opened(lent, f"this session may have {self._openings} allocations of its own open on a GPU")
            return
        try:
            loop = asyncio.get_running_loop()
            arena = await loop.run_in_executor(gpu.beside, gpu.lent, next_number(), lent.identity, lent.handle)
        except CudaError as error:
            self._not_opened(lent, str(error))
            return
        if self._ended():  # meanwhile
            arena.close()
            return
        self._arenas[arena.number] = arena
        self._send(wire.Lending(lent.identity, arena.number, arena.size).encode(), -1)

    def _not_opened(self, lent: wire.Lent, why: str) -> None:
        if not self._ended():
            self._send(wire.Lending(lent.identity, why=why).encode(), -1)

    def _gpu(self, index: int) -> Gpu | None:
        """One that the session may use."""
        allowed = any((device.kind, device.index) == ("GPU", index) for device in self._devices)
        return next((gpu for gpu in self._gpus if allowed and gpu.index == index), None)

    def _full(self) -> bool:
        """Whether there may be no more arenas; says so."""
        if len(self._arenas) < MOST_ARENAS:
            return False
        self._refusals.limit(Limit.SESSION_ARENAS)
        self._refuse(f"this session has {MOST_ARENAS} pieces of shared memory, the most there may be: ask for larger")
        return True

    def _refuse(self, why: str) -> None:
        self._send(wire.refused(Code.RESOURCE_EXHAUSTED, why), -1)

    def _let_go_of(self, arena: Arena | DeviceArena) -> None:
        if isinstance(arena, Arena):
            self._budget.give(arena.size)
        elif not arena.lent:
            self._gpus[arena.gpu].give(arena.size)
        arena.close()
