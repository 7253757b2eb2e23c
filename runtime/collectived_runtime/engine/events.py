"""Events of clients' GPUs: a ring whose value is still being written there may be carried out when it is.

Its instance is in the ledger from the first, with contract, deadline and line, so that whoever decides about it knows;
only its start waits. Nobody else waits for the event, neither in the lane nor on the GPU. The driver may open an event
only when the device is idle: that is done aside, for only the lane can end what keeps the device busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from collectived_proto.local import wire
from collectived_runtime.device.attendant import Errand
from collectived_runtime.device.gpus import Gpu, Region
from collectived_runtime.device.launching import Launch
from collectived_runtime.engine.seat import Seat


@dataclass(frozen=True, slots=True)
class _Wait:
    instance: int
    gpu: Gpu
    event: int
    written: Callable[[], object]


@dataclass(slots=True)
class _Rank:
    handles: dict[int, bytes] = field(default_factory=dict)
    opened: dict[tuple[Gpu, int], Errand] = field(default_factory=dict)  # or about to be
    waits: deque[_Wait] = field(default_factory=deque)  # instances of a rank start in their order
    launch: Launch | None = None  # ends with the event of the first of them


class Events:
    """Of a lane, in its thread.

    Args:
        ask: has something called in the lane's thread, from any thread.
        lose: lets a client go, and says why.
    """

    def __init__(self, ask: Callable[[Callable[[], None]], object], lose: Callable[[Seat, str], None]) -> None:
        self._ask = ask
        self._lose = lose
        self._ranks: dict[int, _Rank] = {}

    def name(self, rank: int, number: int, handle: bytes) -> None:
        """A client has named an event."""
        self._ranks.setdefault(rank, _Rank()).handles[number] = handle

    def gpu_of(self, seat: Seat, ring: wire.Ring) -> Gpu:
        """Where the value of a ring with an event is being written.

        Raises:
            wire.Malformed: its event was never named, or its value does not lie on a GPU.
        """
        rank = self._ranks.get(seat.rank)
        if rank is None or ring.event not in rank.handles:
            raise wire.Malformed(f"a ring with event {ring.event}, which was never named")
        addresses = (*ring.addresses, ring.output) if ring.output is not None else ring.addresses
        memory = seat.memory(*addresses[-1], 0) if addresses else None
        if not isinstance(memory, Region):
            raise wire.Malformed(f"a ring with event {ring.event}, whose value does not lie on a GPU")
        return memory.gpu

    def wait(self, seat: Seat, instance: int, gpu: Gpu, event: int, written: Callable[[], object]) -> None:
        """Calls `written` when the event, as it was recorded last, is over; unless the wait is given up before."""
        rank = self._ranks[seat.rank]
        rank.waits.append(_Wait(instance, gpu, event, written))
        if len(rank.waits) == 1:
            self._begin(seat, rank)

    def give_up(self, seat: Seat, instance: int) -> None:
        """That instance has ended: nobody waits for its value any more."""
        rank = self._ranks.get(seat.rank)
        if rank is None or not rank.waits:
            return
        first = rank.waits[0]
        rank.waits = deque(wait for wait in rank.waits if wait.instance != instance)
        if first.instance == instance:
            self._unfollow(rank)
            if rank.waits:
                self._begin(seat, rank)

    def _begin(self, seat: Seat, rank: _Rank) -> None:
        """To wait for the first."""
        first = rank.waits[0]
        place = first.gpu, first.event
        opened = rank.opened.get(place)
        if opened is None:
            rank.opened[place] = first.gpu.open_event(
                rank.handles[first.event], lambda: self._ask(lambda: self._follow(seat, rank))
            )
        elif opened.done:  # else it is told
            self._follow(seat, rank)

    def _follow(self, seat: Seat, rank: _Rank) -> None:
        """An event is open: if it is that of the first ring, it is waited for."""
        if self._ranks.get(seat.rank) is not rank or not rank.waits or rank.launch is not None:
            return
        first = rank.waits[0]
        opened = rank.opened[first.gpu, first.event]
        if not opened.done:
            return
        if opened.failed is not None:
            self._lose(seat, f"it named an event that cannot be waited for: {opened.failed}")
            return

        def over() -> None:
            self._ask(lambda: self._over(seat, rank, first))

        rank.launch = first.gpu.submit(None, over, (opened.result,))

    def _over(self, seat: Seat, rank: _Rank, first: _Wait) -> None:
        if self._ranks.get(seat.rank) is not rank or not rank.waits or rank.waits[0] is not first:
            return  # it has been given up meanwhile
        assert rank.launch is not None
        failed, rank.launch = rank.launch.failed, None
        if failed is not None:
            self._lose(seat, f"what its GPU was to write cannot be waited for: {failed}")
            return
        rank.waits.popleft()
        first.written()
        if rank.waits:
            self._begin(seat, rank)

    def _unfollow(self, rank: _Rank) -> None:
        if rank.launch is not None:
            rank.launch.stop()
            rank.launch = None

    def drop(self, rank: int) -> None:
        """The rank has gone: nothing of it is waited for any more."""
        known = self._ranks.pop(rank, None)
        if known is None:
            return
        self._unfollow(known)
        for (gpu, _), opened in known.opened.items():
            gpu.end_event(opened)

    def close(self) -> None:
        for rank in list(self._ranks):
            self.drop(rank)
