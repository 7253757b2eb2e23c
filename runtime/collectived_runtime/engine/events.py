"""Events of clients' GPUs: a ring whose value is still being written there is taken when it is.

A rank has arrived when its value can be read. Until then its rings wait here, in their order; everything else that it
says is heard at once. Nobody else waits for it, neither in the lane nor on the GPU. The driver may open an event only
when the device is idle: that is done aside, for only the lane can end what keeps the device busy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from collectived_proto.local import wire
from collectived_runtime.device.attendant import Errand
from collectived_runtime.device.gpus import Gpu, Region
from collectived_runtime.device.launching import Launch
from collectived_runtime.engine.seat import Seat


@dataclass(slots=True)
class _Rank:
    handles: dict[int, bytes] = field(default_factory=dict)
    opened: dict[tuple[Gpu, int], Errand] = field(default_factory=dict)  # or about to be
    waiting: deque[tuple[wire.Ring, float]] = field(default_factory=deque)  # and when each came
    launch: Launch | None = None  # ends with the event of the first of them


class Events:
    """Of a lane, in its thread.

    Args:
        ask: has something called in the lane's thread, from any thread.
        take: takes a message of a client; False where it is the last. lose: lets a client go, and says why.
    """

    def __init__(
        self,
        ask: Callable[[Callable[[], None]], object],
        take: Callable[[Seat, bytes], bool],
        lose: Callable[[Seat, str], None],
    ) -> None:
        self._ask = ask
        self._take = take
        self._lose = lose
        self._ranks: dict[int, _Rank] = {}

    def name(self, rank: int, number: int, handle: bytes) -> None:
        """A client has named an event."""
        self._ranks.setdefault(rank, _Rank()).handles[number] = handle

    def holds(self, seat: Seat, ring: wire.Ring) -> bool:
        """Whether a ring has to wait; it comes again when it need not.

        Raises:
            wire.Malformed: its event was never named, or its value does not lie on a GPU.
        """
        rank = self._ranks.get(seat.rank)
        if not ring.event and (rank is None or not rank.waiting):
            return False
        if rank is None or (ring.event and ring.event not in rank.handles):
            raise wire.Malformed(f"a ring with event {ring.event}, which was never named")
        if len(rank.waiting) >= 2 * wire.MAX_OUTSTANDING:
            raise wire.Malformed(f"more than {2 * wire.MAX_OUTSTANDING} rings that wait for events")
        rank.waiting.append((ring, time.monotonic()))
        if len(rank.waiting) == 1:
            self._wait(seat, rank)
        return True

    def _wait(self, seat: Seat, rank: _Rank) -> None:
        """For the event of the first ring."""
        ring, _ = rank.waiting[0]
        addresses = (*ring.addresses, ring.output) if ring.output is not None else ring.addresses
        memory = seat.memory(*addresses[-1], 0) if addresses else None
        if not isinstance(memory, Region):
            raise wire.Malformed(f"a ring with event {ring.event}, whose value does not lie on a GPU")
        gpu = memory.gpu
        opened = rank.opened.get((gpu, ring.event))
        if opened is not None:  # no other ring has come this far before it was
            self._follow(seat, rank, gpu, opened)
            return
        opening = gpu.open_event(
            rank.handles[ring.event], lambda: self._ask(lambda: self._follow(seat, rank, gpu, opening))
        )
        rank.opened[gpu, ring.event] = opening

    def _follow(self, seat: Seat, rank: _Rank, gpu: Gpu, opened: Errand) -> None:
        """The event of the first ring is open: now it is waited for."""
        if self._ranks.get(seat.rank) is not rank or not rank.waiting:
            return
        if opened.failed is not None:
            self._lose(seat, f"it named an event that cannot be waited for: {opened.failed}")
            return
        rank.launch = gpu.submit(None, lambda: self._ask(lambda: self._over(seat, rank)), (opened.result,))

    def _over(self, seat: Seat, rank: _Rank) -> None:
        """The first ring goes on, and those behind it that need not wait."""
        if self._ranks.get(seat.rank) is not rank or not rank.waiting:
            return
        assert rank.launch is not None
        failed, rank.launch = rank.launch.failed, None
        ring, came = rank.waiting.popleft()
        following, rank.waiting = rank.waiting, deque()
        if failed is not None:
            self._lose(seat, f"what its GPU was to write cannot be waited for: {failed}")
            return
        if self._take(seat, _later(ring, came).encode()):
            for other, since in following:
                if not self._take(seat, other._replace(remaining=_left(other, since)).encode()):
                    return

    def drop(self, rank: int) -> None:
        """The rank has gone: nothing of it is waited for any more."""
        known = self._ranks.pop(rank, None)
        if known is None:
            return
        if known.launch is not None:
            known.launch.stop(0.0)
        for (gpu, _), opened in known.opened.items():
            gpu.end_event(opened)

    def close(self) -> None:
        for rank in list(self._ranks):
            self.drop(rank)


def _later(ring: wire.Ring, came: float) -> wire.Ring:
    """As if it came now, with nothing to wait for."""
    return ring._replace(event=0, remaining=_left(ring, came))


def _left(ring: wire.Ring, came: float) -> float:
    """Of its time; of what has none left, next to nothing."""
    return max(1e-6, ring.remaining - (time.monotonic() - came)) if ring.remaining else 0.0
