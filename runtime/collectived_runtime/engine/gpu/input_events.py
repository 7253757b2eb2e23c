"""Events of clients' GPUs: a submission whose value is still being written there may be carried out when it is.

Its instance is in the tracker from the first, with contract, deadline and line, so that verdicts can name it;
only its start waits. Nothing else waits for the event, neither in the group loop nor on the GPU. The driver may open an
event only when the device is idle: that is done aside, for only the group loop can end what keeps the device busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from collectived_proto.ipc import messages
from collectived_runtime.device.blocking_thread import BlockingCall
from collectived_runtime.device.gpus import Gpu, Region
from collectived_runtime.device.launch_thread import Launch
from collectived_runtime.engine.clients.local_rank import LocalRank


@dataclass(frozen=True, slots=True)
class _PendingInput:
    instance: int
    gpu: Gpu
    event: int
    on_written: Callable[[], object]


@dataclass(slots=True)
class _RankInputs:
    handles: dict[int, bytes] = field(default_factory=dict)
    opened: dict[tuple[Gpu, int], BlockingCall] = field(default_factory=dict)  # or about to be
    waits: deque[_PendingInput] = field(default_factory=deque)  # instances of a rank start in their order
    launch: Launch | None = None  # ends with the event of the first of them


class InputEvents:
    """Waits for values that GPUs of clients are still writing. Used in the thread of one group loop.

    Args:
        call_soon_threadsafe: has something called in that thread, from any thread.
        disconnect: lets a client go, and says why.
    """

    def __init__(
        self,
        call_soon_threadsafe: Callable[[Callable[[], None]], object],
        disconnect: Callable[[LocalRank, str], None],
    ) -> None:
        self._call_soon_threadsafe = call_soon_threadsafe
        self._disconnect = disconnect
        self._ranks: dict[int, _RankInputs] = {}

    def register(self, rank: int, number: int, handle: bytes) -> None:
        """Take note of an event that a client has named."""
        self._ranks.setdefault(rank, _RankInputs()).handles[number] = handle

    def find_gpu(self, local_rank: LocalRank, submission: messages.Submit) -> Gpu:
        """Where the value of a submission with an event is being written.

        Raises:
            messages.MalformedMessage: its event was never named, or its value does not lie on a GPU.
        """
        rank = self._ranks.get(local_rank.rank)
        if rank is None or submission.event not in rank.handles:
            raise messages.MalformedMessage(f"a submission with event {submission.event}, which was never named")
        addresses = (
            (*submission.addresses, submission.output) if submission.output is not None else submission.addresses
        )
        memory = local_rank.resolve_memory(*addresses[-1], 0) if addresses else None
        if not isinstance(memory, Region):
            raise messages.MalformedMessage(
                f"a submission with event {submission.event}, whose value does not lie on a GPU"
            )
        return memory.gpu

    def start_wait(
        self, local_rank: LocalRank, instance: int, gpu: Gpu, event: int, on_written: Callable[[], object]
    ) -> None:
        """Call `on_written` when the event, as it was recorded last, is over, unless `cancel_wait` comes before."""
        rank = self._ranks[local_rank.rank]
        rank.waits.append(_PendingInput(instance, gpu, event, on_written))
        if len(rank.waits) == 1:
            self._start_first(local_rank, rank)

    def cancel_wait(self, local_rank: LocalRank, instance: int) -> None:
        """Give a wait up: that instance has ended."""
        rank = self._ranks.get(local_rank.rank)
        if rank is None or not rank.waits:
            return
        first = rank.waits[0]
        rank.waits = deque(wait for wait in rank.waits if wait.instance != instance)
        if first.instance == instance:
            self._cancel_launch(rank)
            if rank.waits:
                self._start_first(local_rank, rank)

    def _start_first(self, local_rank: LocalRank, rank: _RankInputs) -> None:
        """Begin to wait for the first event."""
        first = rank.waits[0]
        place = first.gpu, first.event
        opened = rank.opened.get(place)
        if opened is None:
            rank.opened[place] = first.gpu.open_event(
                rank.handles[first.event],
                lambda: self._call_soon_threadsafe(lambda: self._submit_wait(local_rank, rank)),
            )
        elif opened.done:  # else it gets a message
            self._submit_wait(local_rank, rank)

    def _submit_wait(self, local_rank: LocalRank, rank: _RankInputs) -> None:
        """An event is open: if it is that of the first submission, it is waited for."""
        if self._ranks.get(local_rank.rank) is not rank or not rank.waits or rank.launch is not None:
            return
        first = rank.waits[0]
        opened = rank.opened[first.gpu, first.event]
        if not opened.done:
            return
        if opened.error is not None:
            self._disconnect(local_rank, f"it named an event that cannot be waited for: {opened.error}")
            return

        def over() -> None:
            self._call_soon_threadsafe(lambda: self._on_event_done(local_rank, rank, first))

        rank.launch = first.gpu.submit(None, over, (opened.result,))

    def _on_event_done(self, local_rank: LocalRank, rank: _RankInputs, first: _PendingInput) -> None:
        if self._ranks.get(local_rank.rank) is not rank or not rank.waits or rank.waits[0] is not first:
            return  # it has been given up meanwhile
        assert rank.launch is not None
        failed, rank.launch = rank.launch.error, None
        if failed is not None:
            self._disconnect(local_rank, f"the event of its GPU's value cannot be waited for: {failed}")
            return
        rank.waits.popleft()
        first.on_written()
        if rank.waits:
            self._start_first(local_rank, rank)

    def _cancel_launch(self, rank: _RankInputs) -> None:
        if rank.launch is not None:
            rank.launch.cancel()
            rank.launch = None

    def remove_rank(self, rank: int) -> None:
        """The rank has gone: nothing of it is waited for any more."""
        known = self._ranks.pop(rank, None)
        if known is None:
            return
        self._cancel_launch(known)
        for (gpu, _), opened in known.opened.items():
            gpu.destroy_event(opened)

    def close(self) -> None:
        for rank in list(self._ranks):
            self.remove_rank(rank)
