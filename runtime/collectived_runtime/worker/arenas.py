"""The memory of one session: what its client asks for, and what it lends of its own on GPUs.

Asks are granted or refused in their order. Everything here runs in the worker's event loop, except `memory`, which
group loops call.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from collectived_proto.devices import DeviceName
from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.ipc.arena import Arena
from collectived_runtime.device.cuda.driver import CudaError
from collectived_runtime.device.gpus import ClearTimeout, DeviceArena, Gpu
from collectived_runtime.engine.base.arenas import new_arena, next_number
from collectived_runtime.engine.base.lent import LentMemory
from collectived_runtime.engine.base.memory_budget import MemoryExhausted, SessionBudget
from collectived_runtime.engine.clients.local_rank import HostOrGpuBytes
from collectived_runtime.limits.descriptors import has_descriptor_room
from collectived_runtime.limits.rejections import Limit, RejectionCounters

MAX_PENDING_REQUESTS = 64  # arenas of one session that it waits for
MAX_ARENAS = 512  # of one session; each takes a descriptor
KEPT_DIVISOR = 16  # memory of a GPU that is kept may take one part in so many of the worker's descriptors
INLINE_COMMIT_BYTES = 1 << 20  # bytes of an arena that take less than a millisecond
_COMMIT_EXECUTOR = ThreadPoolExecutor(
    2, "collectived-arenas"
)  # of the host; its threads start when they are first needed


@dataclass(frozen=True, slots=True)
class ArenaLimits:
    """How much memory a session may have.

    Attributes:
        budget: of shared memory.
        gpu_budgets: of each GPU of the worker.
        descriptors: that this process may have.
        open_allocations: allocations of its client's own that may be open at a time, on each GPU.
    """

    budget: SessionBudget
    gpu_budgets: Mapping[Gpu, SessionBudget]
    descriptors: int
    open_allocations: int


class SessionArenas:
    """The arenas of one session: memory that its client and this worker share.

    Args:
        devices: those that the session may use.
        send: sends a message, with a descriptor or -1. ended: whether the session has.
    """

    def __init__(
        self,
        limits: ArenaLimits,
        devices: Sequence[DeviceName],
        rejections: RejectionCounters,
        send: Callable[[bytes, int], None],
        ended: Callable[[], bool],
    ) -> None:
        self._budget = limits.budget
        self._gpu_budgets = limits.gpu_budgets
        self._devices = devices
        self._rejections = rejections
        self._descriptor_limit = limits.descriptors
        self._max_open_allocations = limits.open_allocations
        self._send = send
        self._is_ended = ended
        self._arenas: dict[int, Arena | DeviceArena] = {}
        self._dropped: list[Arena] = []  # by the client, while something here looks into them
        self._pending_requests: deque[Callable[[], Awaitable[None]]] = deque()
        self.grant_task: asyncio.Task[None] | None = None

    def resolve_memory(self, arena: int, offset: int, length: int) -> HostOrGpuBytes:
        """Those bytes of the client's memory; raises messages.MalformedMessage where they are not all its own."""
        known = self._arenas.get(arena)
        if known is None:
            raise messages.MalformedMessage(f"an address in shared memory {arena}, which is not of this session")
        if offset + length > known.size:
            raise messages.MalformedMessage(
                f"bytes {offset} to {offset + length} of shared memory {arena}, which has {known.size}"
            )
        try:
            if isinstance(known, DeviceArena):
                return known.region(offset, length)
            return known.slice_bytes(offset, length)
        except ValueError:  # dropped just now, in the other thread
            raise messages.MalformedMessage(f"an address in shared memory {arena}, which is being given back") from None

    @property
    def host_bytes(self) -> int:
        kept = [*self._arenas.values(), *self._dropped]
        return sum(arena.size for arena in kept if isinstance(arena, Arena))

    def request_arena(self, size: int) -> None:
        """The client wants an arena. All asks raise messages.MalformedMessage where too many are waiting."""
        self._enqueue_request(partial(self._grant_arena, size))

    def request_device_arena(self, index: int, size: int) -> None:
        """Answer its wish for an arena in the memory of a GPU."""
        self._enqueue_request(partial(self._grant_device_arena, index, size))

    def request_open(self, lent: messages.IpcOpen) -> None:
        """Open memory of its own on a GPU that it lends."""
        self._enqueue_request(partial(self._open_lent_memory, lent))

    def drop(self, number: int) -> None:
        """It needs an arena no longer. Its pages are given back though the client may still map it, and count until
        no code here looks into them."""
        arena = self._arenas.pop(number, None)
        if isinstance(arena, Arena):
            self._dropped.append(arena)
            self._discard_dropped()
        elif arena is not None:
            self._release_arena(arena)

    def drop_all(self) -> None:
        for number in list(self._arenas):
            self.drop(number)
        for arena in self._dropped:  # a reader keeps it
            self._give_back(arena)
        self._dropped.clear()

    def _discard_dropped(self) -> None:
        """Give back those into which no code here looks any more."""
        used = []
        for arena in self._dropped:
            if arena.discard():
                self._give_back(arena)
            else:
                used.append(arena)
        self._dropped = used

    def _give_back(self, arena: Arena) -> None:
        """Give an arena back. Memory that its client keeps, or writes anew, still counts."""
        self._budget.release(arena.size)
        file = arena.detach()
        self._budget.lent.give_back(LentMemory(file, [self._budget], measure_parts=lambda: [file.measure()]))

    def _enqueue_request(self, grant: Callable[[], Awaitable[None]]) -> None:
        if len(self._pending_requests) >= MAX_PENDING_REQUESTS:
            raise messages.MalformedMessage(f"more than {MAX_PENDING_REQUESTS} requests for shared memory at once")
        self._pending_requests.append(grant)
        if self.grant_task is None:
            self.grant_task = asyncio.get_running_loop().create_task(self._process_requests())

    async def _process_requests(self) -> None:
        try:
            while self._pending_requests and not self._is_ended():
                await self._pending_requests.popleft()()
        finally:
            self.grant_task = None

    async def _grant_arena(self, size: int) -> None:
        """Filling pages with zeros takes the kernel long: large arenas come into being beside the event loop."""
        self._discard_dropped()
        if self._refuse_if_full():
            return
        try:
            self._budget.acquire(size)
        except MemoryExhausted as error:
            self._refuse(str(error))
            return
        arena: Arena | None = None
        try:
            arena = new_arena(size, readers_only=False)
            if not has_descriptor_room(self._descriptor_limit, arena.descriptor):
                self._rejections.count_limit(Limit.DESCRIPTORS)
                raise OSError(errno.EMFILE, "this worker has nearly no descriptors left; raise its LimitNOFILE")
            if size <= INLINE_COMMIT_BYTES:
                arena.commit(size)
            else:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(_COMMIT_EXECUTOR, arena.commit, size, lambda: not self._is_ended())
        except (OSError, ValueError, OverflowError) as error:
            if arena is not None:
                arena.close()
            self._budget.release(size)
            if not self._is_ended():
                self._refuse(f"{size} bytes of shared memory: {error}")
            return
        if self._is_ended():  # meanwhile
            arena.close()
            self._budget.release(size)
            return
        self._arenas[arena.number] = arena
        self._send(messages.encode_arena(messages.MessageType.ARENA, arena.number, size), arena.shared_descriptor)

    async def _grant_device_arena(self, index: int, size: int) -> None:
        """Memory of a GPU; its driver takes milliseconds, beside the event loop."""
        gpu = self._find_gpu(index)
        if gpu is None:
            self._send(messages.encode_refused(Code.NOT_FOUND, f"this worker has no device GPU:{index}"), -1)
            return
        if self._refuse_if_full():
            return
        budget = self._gpu_budgets[gpu]
        budget.lent.settle()
        kept, most = budget.retained_count + budget.user.orphaned_count, self._descriptor_limit // KEPT_DIVISOR
        if kept >= most:
            self._rejections.count_limit(Limit.DESCRIPTORS)
            self._refuse(f"{kept} pieces of memory of GPU:{index} were given back and are kept, and {most} may be")
            return
        try:
            budget.acquire(size)
        except MemoryExhausted as error:
            self._refuse(str(error))
            return
        try:
            loop = asyncio.get_running_loop()
            freed = partial(budget.release, size)
            arena = await loop.run_in_executor(gpu.blocking_executor, gpu.create_arena, next_number(), size, freed)
        except CudaError as error:
            if not isinstance(error, ClearTimeout):  # whose memory is still taken
                budget.release(size)
            if not self._is_ended():
                self._refuse(f"{size} bytes of GPU:{index}: {error}")
            return
        budget.release(size)
        budget.force_acquire(arena.size)  # whole pages
        if self._is_ended():  # meanwhile
            self._release_arena(arena)
            return
        self._arenas[arena.number] = arena
        self._send(messages.encode_arena(messages.MessageType.DEVICE_ARENA, arena.number, arena.size), arena.descriptor)

    async def _open_lent_memory(self, lent: messages.IpcOpen) -> None:
        """Open an allocation of the client. Where that fails the client copies; other clients do not notice."""
        gpu = self._find_gpu(lent.gpu)
        if gpu is None:
            self._refuse_open(lent, f"this worker has no device GPU:{lent.gpu}")
            return
        there = [arena for arena in self._arenas.values() if isinstance(arena, DeviceArena) and arena.gpu is gpu]
        if sum(arena.is_imported for arena in there) >= self._max_open_allocations:
            self._rejections.count_limit(Limit.SESSION_OPENINGS)
            self._refuse_open(
                lent, f"this session may have {self._max_open_allocations} allocations of its own open on a GPU"
            )
            return
        try:
            loop = asyncio.get_running_loop()
            arena = await loop.run_in_executor(
                gpu.blocking_executor, gpu.import_arena, next_number(), lent.buffer_id, lent.handle
            )
        except CudaError as error:
            self._refuse_open(lent, str(error))
            return
        if self._is_ended():  # meanwhile
            arena.close()
            return
        self._arenas[arena.number] = arena
        self._send(messages.IpcOpenResult(lent.buffer_id, arena.number, arena.size).encode(), -1)

    def _refuse_open(self, lent: messages.IpcOpen, why: str) -> None:
        if not self._is_ended():
            self._send(messages.IpcOpenResult(lent.buffer_id, reason=why).encode(), -1)

    def _find_gpu(self, index: int) -> Gpu | None:
        """Return a GPU that the session may use."""
        allowed = any((device.kind, device.index) == ("GPU", index) for device in self._devices)
        return next((gpu for gpu in self._gpu_budgets if allowed and gpu.index == index), None)

    def _refuse_if_full(self) -> bool:
        """Return whether there may be no more arenas, and say so."""
        if len(self._arenas) < MAX_ARENAS:
            return False
        self._rejections.count_limit(Limit.SESSION_ARENAS)
        self._refuse(f"this session has {MAX_ARENAS} pieces of shared memory, the most there may be: ask for larger")
        return True

    def _refuse(self, why: str) -> None:
        self._send(messages.encode_refused(Code.RESOURCE_EXHAUSTED, why), -1)

    def _release_arena(self, arena: DeviceArena) -> None:
        """Release an arena. Lent memory is closed. Memory given to the client counts until no process has it."""
        if arena.is_imported:
            arena.close()
            return
        budget = self._gpu_budgets[arena.gpu]
        budget.release(arena.size)
        budget.lent.give_back(LentMemory(arena.detach(), [budget]))
