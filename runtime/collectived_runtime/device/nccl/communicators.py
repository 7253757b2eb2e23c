"""The communicators of a worker: made for a group generation, kept while it lives, aborted on a verdict.

A communicator has one rank per GPU. Making one, and ending one, may block, so both are done by attendants of the GPU:
one for beginnings, one for ends, so that an end never waits for a beginning. A beginning that is wanted no longer,
and every end, has a time limit: one that exceeds it leaves the worker in a state that only its end repairs (`die`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from collectived_runtime.device.blocking_thread import CALL_TIMEOUT_SECONDS, BlockingCall, BlockingThread
from collectived_runtime.device.nccl.interface import Nccl, NcclError, NcclResult

POLL_SECONDS = 0.0005  # seconds between two looks at a communicator that is in progress; at first they are shorter


class Communicator:
    """One rank's end of a communicator.

    A thread that calls NCCL with it holds `call_lock`, and looks at `closing` first: once that is set it may be freed.
    """

    def __init__(self, nccl: Nccl, handle: int, device: int) -> None:
        self.nccl = nccl
        self.handle = handle
        self.device = device
        self.call_lock = threading.Lock()
        self.closing = threading.Event()

    def issue(self, call: Callable[[int], None]) -> None:
        """`call(handle)`; returns when NCCL has put what was asked for on the stream.

        Raises:
            NcclError: it was refused, or the communicator has failed or is being aborted.
        """
        with self.call_lock:
            self._check_open()
            call(self.handle)
        began = time.monotonic()
        while not self._is_ready():
            self.closing.wait(min(POLL_SECONDS, (time.monotonic() - began) / 8))

    def check(self) -> None:
        """Check issued work that is under way. NCCL reports only when asked that it will never end.

        Raises:
            NcclError: the communicator has failed.
        """
        if not self.call_lock.acquire(blocking=False):  # it is being freed, and with it what is under way
            return
        try:
            if not self.closing.is_set():
                self.nccl.is_ready(self.handle)
        finally:
            self.call_lock.release()

    def _is_ready(self) -> bool:
        with self.call_lock:
            self._check_open()
            return self.nccl.is_ready(self.handle)

    def _check_open(self) -> None:
        if self.closing.is_set():
            raise NcclError(NcclResult.INTERNAL_ERROR, "a collective", "its communicator has been aborted")


@dataclass(frozen=True, slots=True)
class DeviceRank:
    """A local participant: `device` as rank number `rank`."""

    device: int
    rank: int


class PendingCommunicators:
    """Communicators of one group that are being made, one per local GPU."""

    def __init__(self, pending_calls: Sequence[BlockingCall], abandon: Callable[[], None]) -> None:
        self._calls = pending_calls
        self._abandon = abandon

    @property
    def done(self) -> bool:
        return all(pending_call.done for pending_call in self._calls)

    def result(self) -> tuple[Communicator, ...]:
        """Of all GPUs, in the order in which they were given; call it once, when it is `done`.

        Raises:
            NcclError: one could not be made; nothing is left of the others.
        """
        for pending_call in self._calls:
            if pending_call.error is not None:
                self._abandon()
                raise pending_call.error
        return tuple(pending_call.result for pending_call in self._calls)

    def cancel(self) -> None:
        """Give up communicators that are not wanted any more: they are aborted, and so are late ones."""
        self._abandon()


class Communicators:
    """See the module. May be used from any thread.

    Args:
        use: makes a GPU current in the calling thread.
        die: called with a reason where a call to NCCL does not return.
    """

    def __init__(
        self,
        nccl: Nccl,
        use: Callable[[int], object],
        die: Callable[[str], object],
        within: float = CALL_TIMEOUT_SECONDS,
    ) -> None:
        self.nccl = nccl
        self._make_current = use
        self._on_hang = die
        self._within = within
        self._threads: dict[tuple[str, int], BlockingThread] = {}
        self._by_key: dict[Hashable, tuple[Communicator, ...]] = {}
        self._lock = threading.Lock()

    def create_unique_id(self, device: int, over: Callable[[], object]) -> BlockingCall:
        """A unique id, in time; minting opens a socket on which the ranks will meet."""
        return self._get_thread("begin", device).submit("minting", lambda _: self.nccl.create_unique_id(), over)

    def create(
        self, size: int, unique_id: bytes, ranks: Sequence[DeviceRank], over: Callable[[], object]
    ) -> PendingCommunicators:
        """Begin to make communicators of `size` ranks for the local ones; calls take effect in order."""

        pending_calls = []
        for rank in ranks:
            what = f"the init of a communicator of {size} ranks on GPU {rank.device}"
            call = functools.partial(self._init_communicator, size=size, unique_id=unique_id, rank=rank)
            pending_calls.append(self._get_thread("begin", rank.device).submit(what, call, over))
        begun = tuple(zip(ranks, pending_calls, strict=True))
        return PendingCommunicators(pending_calls, lambda: self._abandon(begun))

    def get(self, key: Hashable) -> tuple[Communicator, ...] | None:
        """Return what was kept under this key."""
        return self._by_key.get(key)

    def store(self, key: Hashable, made: tuple[Communicator, ...]) -> None:
        with self._lock:
            self._by_key[key] = made

    def tear_down(self, key: Hashable, *, orderly: bool) -> list[BlockingCall]:
        """End what was kept under this key, if anything was.

        Args:
            orderly: nothing is under way, and other ranks may still be at what we have finished.
        """
        with self._lock:
            made = self._by_key.pop(key, ())
        return [self._free(one, orderly) for one in made]

    def close(self) -> None:
        """End all communicators and threads."""
        for key in list(self._by_key):
            self.tear_down(key, orderly=True)
        for attendant in self._threads.values():
            attendant.close()

    def _init_communicator(
        self, pending_call: BlockingCall, size: int, unique_id: bytes, rank: DeviceRank
    ) -> Communicator:
        """Make it, in the communicator's own thread."""
        blocking = not self.nccl.capabilities.nonblocking
        if pending_call.cancel_requested:
            raise NcclError(NcclResult.INTERNAL_ERROR, "init", "given up before it began")
        made = Communicator(self.nccl, self.nccl.init(size, unique_id, rank.rank, blocking=blocking), rank.device)
        try:
            while not self.nccl.is_ready(made.handle):
                if pending_call.cancel_requested:
                    raise NcclError(NcclResult.TIMEOUT, "init", f"not all of {size} ranks have come")
                time.sleep(POLL_SECONDS)
        except BaseException:
            self._free(made, orderly=False)
            raise
        return made

    def _abandon(self, begun: Sequence[tuple[DeviceRank, BlockingCall]]) -> None:
        for rank, pending_call in begun:
            pending_call.cancel_requested = True
            beginnings = self._get_thread("begin", rank.device)
            beginnings.enforce_timeout(pending_call)
            beginnings.submit(
                "a communicator that was given up", functools.partial(self._free_late, pending_call)
            )  # runs when it has ended

    def _free_late(self, given_up: BlockingCall, _: BlockingCall) -> None:
        if given_up.result is not None:
            self._free(given_up.result, orderly=False)

    def _free(self, one: Communicator, orderly: bool) -> BlockingCall:
        one.closing.set()

        def free(_: BlockingCall) -> None:
            held = one.call_lock.acquire(timeout=self._within / 5)  # a call that hangs is what an abort is for
            try:
                (self.nccl.destroy if orderly else self.nccl.abort)(one.handle)
            finally:
                if held:
                    one.call_lock.release()

        attendant = self._get_thread("end", one.device)
        how = "destruction" if orderly else "abort"
        pending_call = attendant.submit(f"the {how} of a communicator on GPU {one.device}", free)
        attendant.enforce_timeout(pending_call)
        return pending_call

    def _get_thread(self, kind: str, device: int) -> BlockingThread:
        with self._lock:
            found = self._threads.get((kind, device))
            if found is None:
                found = BlockingThread(
                    f"gpu {device} {kind}", lambda: self._make_current(device), self._on_hang, self._within
                )
                self._threads[kind, device] = found
            return found
