"""The communicators of a worker: made for a group generation, kept while it lives, aborted on a verdict.

A communicator has one rank per GPU. Making one, and ending one, may block, so both are done by attendants of the GPU:
one for beginnings, one for ends, so that an end never waits for a beginning. What was begun and is wanted no longer,
and every end, has a bound: who exceeds it leaves the worker in a state that only its end repairs (`die`).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from collectived_runtime.device.attendant import WITHIN, Attendant, Errand
from collectived_runtime.device.nccl.interface import Nccl, NcclError, Result

LOOK_EVERY = 0.0005  # seconds between two looks at a communicator that is in progress; at first they are shorter


class Communicator:
    """One rank's end of a communicator.

    Whoever calls NCCL with it holds `in_use`, and looks at `closing` first: once that is set it may be freed.
    """

    def __init__(self, nccl: Nccl, handle: int, device: int) -> None:
        self.nccl = nccl
        self.handle = handle
        self.device = device
        self.in_use = threading.Lock()
        self.closing = threading.Event()

    def issue(self, call: Callable[[int], None]) -> None:
        """`call(handle)`; returns when NCCL has put what was asked for on the stream.

        Raises:
            NcclError: it was refused, or the communicator has failed or is being aborted.
        """
        with self.in_use:
            self._check()
            call(self.handle)
        began = time.monotonic()
        while not self._settled():
            self.closing.wait(min(LOOK_EVERY, (time.monotonic() - began) / 8))

    def check(self) -> None:
        """While what was issued is under way: NCCL tells only who asks that it never will end.

        Raises:
            NcclError: the communicator has failed.
        """
        if not self.in_use.acquire(blocking=False):  # it is being freed, and with it what is under way
            return
        try:
            if not self.closing.is_set():
                self.nccl.ready(self.handle)
        finally:
            self.in_use.release()

    def _settled(self) -> bool:
        with self.in_use:
            self._check()
            return self.nccl.ready(self.handle)

    def _check(self) -> None:
        if self.closing.is_set():
            raise NcclError(Result.INTERNAL_ERROR, "a collective", "its communicator has been aborted")


@dataclass(frozen=True, slots=True)
class Rank:
    """Who takes part from here: `device` as rank number `rank`."""

    device: int
    rank: int


class Making:
    """Communicators of one group that are being made, one per local GPU."""

    def __init__(self, errands: Sequence[Errand], abandon: Callable[[], None]) -> None:
        self._errands = errands
        self._abandon = abandon

    @property
    def done(self) -> bool:
        return all(errand.done for errand in self._errands)

    def made(self) -> tuple[Communicator, ...]:
        """Of all GPUs, in the order in which they were given; call it once, when it is `done`.

        Raises:
            NcclError: one could not be made; nothing is left of the others.
        """
        for errand in self._errands:
            if errand.failed is not None:
                self._abandon()
                raise errand.failed
        return tuple(errand.result for errand in self._errands)

    def give_up(self) -> None:
        """Nobody wants them any more: what is there is aborted, and so is what comes late."""
        self._abandon()


class Communicators:
    """See the module. May be used from any thread.

    Args:
        use: makes a GPU current in the calling thread.
        die: called with a reason where a call to NCCL does not return.
    """

    def __init__(
        self, nccl: Nccl, use: Callable[[int], object], die: Callable[[str], object], within: float = WITHIN
    ) -> None:
        self.nccl = nccl
        self._use = use
        self._die = die
        self._within = within
        self._attendants: dict[tuple[str, int], Attendant] = {}
        self._kept: dict[Hashable, tuple[Communicator, ...]] = {}
        self._lock = threading.Lock()

    def mint(self, device: int, over: Callable[[], object]) -> Errand:
        """A unique id, in time; minting opens a socket on which the ranks will meet."""
        return self._attendant("begin", device).attend("minting", lambda _: self.nccl.unique_id(), over)

    def make(self, size: int, unique_id: bytes, ranks: Sequence[Rank], over: Callable[[], object]) -> Making:
        """Begins to make communicators of `size` ranks for the local ones; calls of `make` take effect in order."""

        errands = []
        for rank in ranks:
            what = f"the init of a communicator of {size} ranks on GPU {rank.device}"
            call = functools.partial(self._begun, size=size, unique_id=unique_id, rank=rank)
            errands.append(self._attendant("begin", rank.device).attend(what, call, over))
        begun = tuple(zip(ranks, errands, strict=True))
        return Making(errands, lambda: self._abandon(begun))

    def get(self, key: Hashable) -> tuple[Communicator, ...] | None:
        """What was kept under this key."""
        return self._kept.get(key)

    def keep(self, key: Hashable, made: tuple[Communicator, ...]) -> None:
        with self._lock:
            self._kept[key] = made

    def end(self, key: Hashable, *, orderly: bool) -> list[Errand]:
        """Ends what was kept under this key, if anything was.

        Args:
            orderly: nothing is under way, and other ranks may still be at what we have finished.
        """
        with self._lock:
            made = self._kept.pop(key, ())
        return [self._free(one, orderly) for one in made]

    def close(self) -> None:
        """Ends all communicators and threads."""
        for key in list(self._kept):
            self.end(key, orderly=True)
        for attendant in self._attendants.values():
            attendant.close()

    def _begun(self, errand: Errand, size: int, unique_id: bytes, rank: Rank) -> Communicator:
        """In the attendant's thread."""
        blocking = not self.nccl.capabilities.nonblocking
        if errand.given_up:
            raise NcclError(Result.INTERNAL_ERROR, "init", "given up before it began")
        made = Communicator(self.nccl, self.nccl.init(size, unique_id, rank.rank, blocking=blocking), rank.device)
        try:
            while not self.nccl.ready(made.handle):
                if errand.given_up:
                    raise NcclError(Result.TIMEOUT, "init", f"not all of {size} ranks have come")
                time.sleep(LOOK_EVERY)
        except BaseException:
            self._free(made, orderly=False)
            raise
        return made

    def _abandon(self, begun: Sequence[tuple[Rank, Errand]]) -> None:
        for rank, errand in begun:
            errand.given_up = True
            beginnings = self._attendant("begin", rank.device)
            beginnings.bound(errand)
            beginnings.attend("what was given up", functools.partial(self._late, errand))  # runs when it has ended

    def _late(self, given_up: Errand, _: Errand) -> None:
        if given_up.result is not None:
            self._free(given_up.result, orderly=False)

    def _free(self, one: Communicator, orderly: bool) -> Errand:
        one.closing.set()

        def free(_: Errand) -> None:
            held = one.in_use.acquire(timeout=self._within / 5)  # a call that hangs is what an abort is for
            try:
                (self.nccl.destroy if orderly else self.nccl.abort)(one.handle)
            finally:
                if held:
                    one.in_use.release()

        attendant = self._attendant("end", one.device)
        how = "destruction" if orderly else "abort"
        errand = attendant.attend(f"the {how} of a communicator on GPU {one.device}", free)
        attendant.bound(errand)
        return errand

    def _attendant(self, kind: str, device: int) -> Attendant:
        with self._lock:
            found = self._attendants.get((kind, device))
            if found is None:
                found = Attendant(f"gpu {device} {kind}", lambda: self._use(device), self._die, self._within)
                self._attendants[kind, device] = found
            return found
