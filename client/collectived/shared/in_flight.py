"""Calls in flight, and what the worker's messages mean for them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from collectived.calls.call import ALL_PACKS, Call
from collectived.calls.callbacks import Callbacks
from collectived.calls.leader_follower import LeaderFollower
from collectived.calls.rank_state import RankState
from collectived.shared.results import MappedResults
from collectived_proto.ipc import messages
from collectived_proto.ipc.parts import ResultPart, parse_result_part
from collectived_proto.types import Verdict

_DONE = int(messages.MessageType.DONE)
_SEGMENT_KINDS = (messages.MessageType.SEGMENT, messages.MessageType.KNOCKER, messages.MessageType.NO_SEGMENT)


class PingReply:
    """The answer to one PING, awaited as a call is.

    Attributes:
        verdict: what the calls in flight end with once it comes, for then the worker reads their inputs no more, or
            says that it does.
    """

    __slots__ = ("received", "verdict")

    def __init__(self, verdict: Verdict | None) -> None:
        self.received = False
        self.verdict = verdict

    def is_ready(self, packs: int = ALL_PACKS) -> bool:
        return self.received


class InFlightCalls:
    """Under its owner's lock, all of it.

    Attributes:
        calls: by instance.
        pending_pings: of the PINGs that have not been answered, in order.
        never: a target that never comes, for threads that wait for any news.
        on_segment: takes over the descriptor that came with a message about segments.
        on_matching: the same of messages for a rank that matches by itself.
        on_carrier: the same of the socket for its carrier.
        on_ended: called when a call ends, and with which verdict.
        inputs_released: a target that comes when no memory is in use whose release the worker has promised to announce.
    """

    def __init__(
        self, calls: dict[int, Call], standing: RankState, turns: LeaderFollower, callbacks: Callbacks
    ) -> None:
        self.calls = calls
        self.pending_pings: deque[PingReply] = deque()
        self.results = MappedResults()
        self._rank_state = standing
        self._leader_follower = turns
        self._callbacks = callbacks
        self.inputs_released = PingReply(None)
        self.inputs_released.received = True
        self.never = PingReply(None)
        self.on_segment: Callable[[bytes, int], None] = _refuse
        self.on_matching: Callable[[bytes, int], None] = _refuse
        self.on_carrier: Callable[[bytes, int], None] = _refuse
        self.on_ended: Callable[[Call, Verdict | None], None] = lambda call, verdict: None
        self._retired: dict[tuple[int, int], Call] = {}  # by generation and instance, until the worker says otherwise
        self._waiting = 0  # how many wait to join, as the worker said last

    def handle_message(self, message: bytes, descriptor: int) -> None:
        """Takes in a message of the worker.

        Raises:
            MalformedMessage, ValueError, OSError: it is not what a worker sends.
        """
        if message[0] == _DONE:
            self._on_done(messages.parse_done(message))
            return
        kind = messages.parse_type(message)
        if kind is messages.MessageType.ARENA and descriptor >= 0:
            self.results.add_arena(message, descriptor)
            return
        if kind in _SEGMENT_KINDS and (descriptor >= 0 or kind is messages.MessageType.NO_SEGMENT):
            self.on_segment(message, descriptor)
            return
        if kind is messages.MessageType.RANK_LINK:
            self.on_matching(message, descriptor)
            return
        if kind is messages.MessageType.CARRIER:
            self.on_carrier(message, descriptor)
            return
        if descriptor >= 0:
            os.close(descriptor)
        if kind is messages.MessageType.MESSAGE:
            self.on_matching(message, -1)
        elif kind is messages.MessageType.FAILED:
            self._on_failed(*messages.parse_failed(message), messages.is_in_use(message))
        elif kind is messages.MessageType.WITHDRAWN:
            self._on_withdrawn(messages.parse_withdrawal(message))
        elif kind is messages.MessageType.RESULT_PART:
            self._on_part(parse_result_part(message))
        elif kind is messages.MessageType.LAUNCHED:
            self._on_launched(messages.parse_launched(message))
        elif kind is messages.MessageType.PONG:
            self._on_pong(messages.is_in_use(message))
        elif kind is messages.MessageType.FREED:
            self._on_freed(messages.parse_freed(message))
        elif kind is messages.MessageType.ARENA_RETIRED:
            self.results.drop_arena(message)
        elif kind is messages.MessageType.WAITING_JOINERS:
            self._waiting = messages.parse_waiting(message)
        else:
            raise messages.MalformedMessage(f"the worker does not send {kind.name} there")

    def _on_done(self, done: messages.Completion) -> None:
        call = self.calls.get(done.instance)
        if call is None:  # given up on, and with it the generation
            retired = [number for number in self._retired if number[1] == done.instance]
            if (
                done.is_last and retired
            ):  # the worker is done with it all the same, of the latest generation that had it
                self._on_freed(max(retired))
            return
        prepared, call.source = call.prepared, done.source
        if done.has_result and call.result_buffer is None:
            self._attach_result(call, done)
        if prepared.pack_count and (done.is_last or not prepared.accepts_any):
            if call.result_buffer is None and not call.has_result_elsewhere and prepared.receives:
                raise messages.MalformedMessage(f"{prepared.op} without a result")
            if done.pack not in call.completed_packs:  # it may have asked once more for what was on its way
                call.completed_packs.append(done.pack)
        if done.is_last:
            self.end(call, self._find_gap(call))
        else:
            self._leader_follower.wake(call)

    def _on_part(self, part: ResultPart) -> None:
        call = self.calls.get(part.instance)
        if call is None:  # given up on, or ended: its slot is released at once
            self.results.open_slot(part)
            return
        if not call.takes_parts:
            raise messages.MalformedMessage(f"a part of the result of {call.prepared.op}, which was not asked for")
        if call.result_buffer is None:
            self._attach_result(call, part)
        call.parts.append((part.start, part.stop))

    def _attach_result(self, call: Call, told: messages.Completion | ResultPart) -> None:
        slot = self.results.open_slot(told)
        call.attach_result(slot)

    def _find_gap(self, call: Call) -> Verdict | None:
        """Return the verdict that ends a call of which this process failed to take in a pack."""
        prepared = call.prepared
        if not prepared.receives or prepared.accepts_any or len(call.completed_packs) >= prepared.pack_count:
            return None
        if self._rank_state.verdict is None:
            raise messages.MalformedMessage(f"it ended {prepared.op} before its result had come")
        return self._rank_state.verdict

    def _on_launched(self, launched: messages.Launched) -> None:
        call = self.calls.get(launched.instance)
        if call is None or not call.is_stream_ordered or call.launched is not None:  # it has been given up on
            self.results.release_event(launched.event)
            return
        call.waiting = self._waiting
        call.launched = launched
        self._leader_follower.wake(call)

    def _on_failed(self, instance: int, serialized: bytes, in_use: bool) -> None:
        verdict = self._rank_state.parse_verdict(serialized)
        if in_use:
            self.inputs_released.received = False
        else:
            self._on_freed((verdict.generation, instance))
        self._rank_state.apply_verdict(verdict)
        for call in list(self.calls.values()):
            # A send or recv ends by its own number only: until then the worker may be reading its input.
            covered = verdict.from_instance <= call.instance < messages.P2P_BASE or call.instance == instance
            if call.generation == verdict.generation and covered:
                self.end(call, verdict, retire=in_use and call.instance == instance)

    def _on_withdrawn(self, told: messages.Withdrawal) -> None:
        """A receive has ended alone."""
        call = self.calls.get(told.instance)
        if call is None or call.generation != told.generation:
            self._on_freed((told.generation, told.instance))
        else:
            self.end(call, self._rank_state.make_withdrawal(call, told.code))

    def _on_freed(self, number: tuple[int, int]) -> None:
        """The worker reads and writes nothing of that generation and instance any more."""
        retired = self._retired.pop(number, None)
        if retired is not None:
            retired.release_retired()
        if not self._retired:
            self.inputs_released.received = True
            self._leader_follower.wake(self.inputs_released)

    def _on_pong(self, in_use: bool) -> None:
        if not self.pending_pings:
            return
        echo = self.pending_pings.popleft()
        echo.received = True
        self._leader_follower.wake(echo)
        if echo.verdict is not None:
            self.inputs_released.received &= not in_use
            self.end_all(echo.verdict, retire=in_use)

    def end_all(self, verdict: Verdict, retire: bool = False) -> None:
        """Ends every call; with `retire`, the worker may still be reading their inputs."""
        for call in list(self.calls.values()):
            self.end(call, verdict, retire)

    def end(self, call: Call, verdict: Verdict | None, retire: bool = False) -> None:
        """Ends a call; with `retire`, the worker may still be reading its inputs.

        Once more for one that has ended, but amid whose end something failed.
        """
        if not call.complete:
            if retire:
                self._retired[call.generation, call.instance] = call
            call.waiting = self._waiting
            if call.launched is not None:
                self.results.release_event(call.launched.event)
            self._rank_state.on_call_ended(call, verdict)
            call.end(verdict, retire)
        self.on_ended(call, verdict)
        self._callbacks.on_call_ended(call)
        del self.calls[call.instance]  # not before: what failed until here still has to end
        self._leader_follower.wake(call)
        if self.pending_pings and not self.calls:  # threads that wait for an empty flight list need not wait longer
            for echo in self.pending_pings:
                if echo.verdict is not None:
                    echo.received = True
                    self._leader_follower.wake(echo)


def _refuse(message: bytes, descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
    raise messages.MalformedMessage(f"a {messages.parse_type(message).name} that was not announced")
