"""A rank whose group has ranks of other workers, too: it brings small values to the segment of its host.

All other calls it submits over its doorbell, in one order with those in the segment. The segment only says that nothing
completes any more. The verdict, and the calls that it ends, come over the doorbells of all ranks.
"""

from __future__ import annotations

import logging
import os
import socket
from time import monotonic

from collectived.calls.buffers import ArenaAddress
from collectived.calls.call import ALL_PACKS, Call
from collectived.calls.leader_follower import SIGNAL_CHECK_INTERVAL
from collectived.calls.prepare import PreparedCall
from collectived.shared.doorbell import Doorbell
from collectived.shared.lent_call import GenerationCarrier, LentCall, may_lend
from collectived.shared.segment_call import SegmentCall
from collectived.shared.segment_channel import SegmentChannel
from collectived.values import nest
from collectived.values.leaves import Array
from collectived_native import core
from collectived_proto.deadline import Deadline
from collectived_proto.ipc import messages
from collectived_proto.ipc.carrier_orders import parse_carrier
from collectived_proto.types import GroupInfo

log = logging.getLogger("collectived")


class SpanningChannel(SegmentChannel):
    """One rank's place in the segment of its generation, beside the place of its worker."""

    def __init__(self, sock: socket.socket, group: GroupInfo, rank: int, worker: str) -> None:
        super().__init__(sock, group, rank, worker)
        self._in_flight.on_carrier = self._on_carrier
        self._is_alone = self._worker_count == group.size
        self._carrier: GenerationCarrier | None = None

    def make_call(
        self, prepared: PreparedCall, arrays: list[Array], located: list[ArenaAddress | None] | None, spec: nest.Spec
    ) -> Call:
        if self._engines.takes(prepared):
            return SegmentCall(prepared, arrays, spec)
        if self._is_alone and located is None and may_lend(prepared):
            carrier = self._carrier
            is_current = carrier is not None and carrier.generation == self.rank_state.generation
            return LentCall(prepared, arrays if prepared.contributes else [], spec, carrier if is_current else None)
        return Doorbell.make_call(self, prepared, arrays, located, spec)

    def _try_submit(self, call: Call, deadline: Deadline | None, addresses: tuple[ArenaAddress, ...]) -> bool:
        if not self._engines.is_declined and self.rank_state.verdict is None:
            self._require_engine(deadline)  # numbers are its
        if self._carrier is not None and self._carrier.generation != self.rank_state.generation:
            self._drop_carrier()
        if isinstance(call, SegmentCall):
            self._send_released()  # its worker may need the place for what comes
        return super()._try_submit(call, deadline, addresses)

    def _on_carrier(self, message: bytes, descriptor: int) -> None:
        """Begin to carry large values. Under the mutex."""
        try:
            generation = parse_carrier(message)
            if descriptor < 0 or generation != self.rank_state.generation or self._carrier is not None:
                return
            descriptor, orders = -1, descriptor
            self._carrier = GenerationCarrier(generation, core.carrier(orders))
        except (OSError, RuntimeError) as error:  # there is no thread, or no descriptor, to be had
            log.debug("large values go by the worker: %s", error)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _drop_carrier(self, *, is_last: bool = False) -> None:
        """Let go of the carrier of a generation that is over, or of the last one."""
        with self.mutex:
            carrier = self._carrier
            if carrier is None or (carrier.generation == self.rank_state.generation and not is_last):
                return
            self._carrier = None
        carrier.core.close()

    def detach(self) -> None:
        self._drop_carrier(is_last=True)
        super().detach()

    def invalidate_after_fork(self, why: str) -> None:
        super().invalidate_after_fork(why)
        if self._carrier is not None:
            self._carrier.core.close()  # which closes the descriptors of this process alone

    def _has_room(self, post: bool) -> bool:
        engine = self._engines.get(self.rank_state.generation)  # of a generation that may have begun since
        return (self._engines.is_declined or engine is not None) and super()._has_room(post)

    def _assign_number(self, call: Call) -> None:
        engine = self._engines.get(self.rank_state.generation)
        if engine is None or call.prepared.is_p2p:
            super()._assign_number(call)
            return
        # One count with what goes by the segment. From here on it may have its number.
        call.assign_instance(self.rank_state.generation, engine.next_instance())
        call.assign_instance(self.rank_state.generation, engine.skip())

    def _hear(self, call: SegmentCall) -> None:
        """Take a call's messages from the doorbell. Another thread may have read them before their call was known."""
        self.poll()
        if call.complete:
            return
        if not call.is_asked:
            call.is_asked = True
            self._ask(call)
        self._read_for_a_while(call)

    def _fail(self, call: SegmentCall, reason: int) -> None:
        """Nothing completes any more: the call waits for its verdict, over the doorbell; for a while here."""
        if reason == core.WORKER:
            super()._fail(call, reason)
            return
        if not call.is_asked:
            call.is_asked = True
            call.begin_patience(monotonic())
            self._ask(call)
        self._read_for_a_while(call)

    def _read_for_a_while(self, call: SegmentCall) -> None:
        end = monotonic() + SIGNAL_CHECK_INTERVAL
        if not self._lead(call, ALL_PACKS, end, self._cancel_call):
            self._leader_follower.wait_as_follower(call, ALL_PACKS, min(end, call.cutoff))
            self._check_cutoff(call)

    def _ask(self, call: SegmentCall) -> None:
        self._last_received = monotonic()
        asked = messages.Submit(call.generation, call.prepared.id, call.instance, 0.0, False, ())
        if not self._send(asked.encode(), call):
            self.poll()  # a worker that has ended in order has said why before
            with self.mutex:
                self._mark_lost("it takes no more messages")
            self.callbacks.dispatch()
