"""A rank of a group of several workers that matches its receives and messages by itself.

Its worker hands over what comes for it. To a rank to which it sends again and again it gets a rank link
(`rank_links.py`), over which messages go without any worker. The worker learns of a send or receive that waits: it
reports what stalls, and says by which verdict it ends.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any

from collectived.calls.buffers import ArenaAddress
from collectived.calls.call import ALL_PACKS, Call
from collectived.calls.leader_follower import SIGNAL_CHECK_INTERVAL
from collectived.calls.prepare import PreparedCall
from collectived.calls.timeout import DEADLINE_GRACE
from collectived.errors import UnavailableError
from collectived.shared import seqpacket
from collectived.shared.message_call import (
    KeptMessage,
    MessageCall,
    make_memory,
    may_send,
    measure_kept,
    view_bytes,
)
from collectived.shared.message_exchange import BrokenLink, MessageExchange
from collectived.shared.rank_link import OutgoingLink
from collectived.shared.rank_links import RankLinks
from collectived.shared.segment_repeats import RUN_SECONDS
from collectived.shared.short_messages import ShortMessages
from collectived.shared.spanning_channel import SpanningChannel
from collectived.values import nest
from collectived.values.leaves import Array
from collectived_native import core
from collectived_proto.deadline import Deadline
from collectived_proto.errors import Code
from collectived_proto.ipc import messages, rank_messages
from collectived_proto.ipc.rank_messages import Header
from collectived_proto.types import GroupInfo, Operation, Recv, Send, Verdict

_SEND_TIMEOUT = 10.0  # seconds in which a worker, or a receiver, makes room for a message
_RELEASED_BYTES = 4 << 20  # of slots, after which the worker is notified that they are free,
_RELEASED_SLOTS = 64  # or after so many slots
_LAST_SECONDS = 2.0  # for all of a message that is being read when a verdict comes


class MatchingChannel(SpanningChannel):
    """One rank's place beside its worker, with its messages."""

    def __init__(self, sock: socket.socket, group: GroupInfo, rank: int, worker: str) -> None:
        super().__init__(sock, group, rank, worker)
        self._in_flight.on_matching = self._on_offer
        self._in_flight.on_ended = self._on_ended
        self._exchange: MessageExchange | None = None
        self._released = 0  # bytes of slots since the worker was notified
        self._short = ShortMessages(self, self._spin if self._can_spin else None)
        self._repeat_collective = self.repeat
        self.repeat = self._repeat

    def make_call(
        self, prepared: PreparedCall, arrays: list[Array], located: list[ArenaAddress | None] | None, spec: nest.Spec
    ) -> Call:
        if prepared.is_p2p and not self._engines.is_declined:
            operation = prepared.collective.operation
            if isinstance(operation, Recv) or (self._find_link(operation) is not None and may_send(prepared)):
                return MessageCall(prepared, arrays, spec)
        return super().make_call(prepared, arrays, located, spec)

    def _repeat(self, operation: Operation, value: Any, out: Any, frame: FrameType | None) -> Any:
        if isinstance(operation, Send):
            return self._short.send(operation, value)
        if isinstance(operation, Recv):
            return self._short.receive(operation, out)
        return self._repeat_collective(operation, value, out, frame)

    def remember(self, call: Call, operation: Operation, value: Any, frame: FrameType) -> None:
        if isinstance(call, MessageCall):
            self._short.remember(call, operation, value)
        else:
            super().remember(call, operation, value, frame)

    def find_exchange(self) -> MessageExchange | None:
        exchange, state = self._exchange, self.rank_state
        if exchange is None or exchange.generation != state.generation or exchange.broken:
            return None
        return None if state.verdict is not None or self.invalid_reason else exchange

    def count_message(self, kind: int, nbytes: int, began: float) -> None:
        engine = self._engines.get(self.rank_state.generation)
        try:
            if engine is not None:
                engine.count_message(kind, nbytes, int((monotonic() - began) * 1e9))
        except RuntimeError:  # it has been detached since
            pass

    # Calls

    def _find_link(self, operation: Operation) -> OutgoingLink | None:
        exchange = self._exchange
        if exchange is None or exchange.generation != self.rank_state.generation or not isinstance(operation, Send):
            return None
        return exchange.links.find_ready(operation.to)

    def _try_submit(self, call: Call, deadline: Deadline | None, addresses: tuple[ArenaAddress, ...]) -> bool:
        if not call.prepared.is_p2p or self._engines.is_declined:
            if self._exchange is not None and self._exchange.generation != self.rank_state.generation:
                self._drop_exchange()
            return super()._try_submit(call, deadline, addresses)
        state = self.rank_state
        if state.verdict is None:
            self._require_engine(deadline)
            self._require_exchange()
        exchange = self._exchange
        if exchange is not None and exchange.generation == state.generation:
            self._check_broken(exchange)
        if state.verdict is not None:
            call.end(state.verdict)
            return True
        if exchange is None or exchange.generation != state.generation:  # another thread has gone on just now
            return False
        if isinstance(call, MessageCall):
            return self._start_message(exchange, call)
        if not super()._try_submit(call, deadline, addresses):
            return False
        operation = call.prepared.collective.operation
        assert isinstance(operation, Send)
        with self.mutex:
            if call.generation == exchange.generation:
                exchange.given[operation.to] += 1
        return True

    def _require_exchange(self) -> None:
        """Begin that of the current generation: the worker learns that this rank matches by itself."""
        with self._submit_lock:  # before any submission
            generation = self.rank_state.generation
            if self._exchange is not None and self._exchange.generation == generation:
                return
            links = RankLinks(self.mutex, self, self._socket.fileno(), super().poll)
            with self.mutex:  # first: an answer may come to another thread
                before, self._exchange = self._exchange, MessageExchange(generation, self.rank_state.rank, links)
            sent = seqpacket.send(self._socket, rank_messages.encode_matching(generation), _SEND_TIMEOUT)
        if before is not None:
            before.links.close()
        if not sent:
            with self.mutex:
                self._mark_lost("it takes no more messages")
            self.callbacks.dispatch()

    def _drop_exchange(self) -> None:
        """Let go of the messages of a generation that is over."""
        with self.mutex:
            exchange = self._exchange
            if exchange is None or exchange.generation == self.rank_state.generation:
                return
            self._exchange = None
        exchange.links.close()

    # Beginning

    def _start_message(self, exchange: MessageExchange, call: MessageCall) -> bool:
        call.began = monotonic()
        link = exchange.links.outgoing.get(call.peer)
        found: KeptMessage | None = None
        receives = call.prepared.receives
        if link is None and not receives:  # another thread has gone on to the next generation just now
            raise UnavailableError(
                f"group {self.rank_state.group.name!r} has gone on in another generation; send again"
            )
        parts = [] if receives else call.begin_send(exchange.given[call.peer])
        with self.mutex:
            state = self.rank_state
            is_current = exchange is self._exchange and exchange.generation == state.generation
            if not is_current or state.verdict is not None or not self._has_room(True):
                return False
            self._register(call)
            if receives:
                found = exchange.post(call)
        if found is not None:
            self._deliver(call, found)
        elif link is not None and not receives:
            if exchange.links.send(link, parts, call):
                self._complete(call)
            elif call.complete:  # another thread has ended it meanwhile
                exchange.links.discard(call)
        if call.is_async and not call.complete:
            self._announce_later(call)
        self.callbacks.dispatch()
        return True

    def _deliver(self, call: MessageCall, message: KeptMessage) -> None:
        holds_slot = message.is_in_slot
        try:
            message.deliver(call)
        except (MemoryError, ValueError) as error:
            self._refuse(error)
        self._complete(call)
        if holds_slot:  # until now; a rank that only receives says so by a message of its own, if it is worth one
            self._released += max(call.nbytes, _RELEASED_BYTES // _RELEASED_SLOTS)
            if self._released >= _RELEASED_BYTES:
                self._released = 0
                self._send_released()

    def _complete(self, call: MessageCall) -> None:
        """A send has left, or a receive has its value."""
        if not call.complete:
            self.count_message(core.RECEIVES if call.prepared.receives else core.SENDS, call.nbytes, call.began)
        self._end_letter(call, None, messages.Completion(call.instance, 0, True, False).encode())

    def _on_ended(self, call: Call, verdict: Verdict | None) -> None:
        """A call ends, in any way; under the mutex."""
        exchange = self._exchange
        if not isinstance(call, MessageCall) or exchange is None:
            return
        exchange.matcher.withdraw(call)
        exchange.links.turns.wake(call)
        if exchange.links.turns.is_led_elsewhere:
            exchange.links.interrupt()
        if verdict is not None:
            exchange.failed.append(call)

    # Messages over links, in the thread that reads them

    def take_expected(self, source: int, memory: bytearray, begin: int, end: int) -> int:
        with self.mutex:
            exchange = None if self.rank_state.has_aborted else self._exchange
            return exchange.take_expected(source, memory, begin, end) if exchange else 0

    def may_read(self, source: int, header: Header) -> bool:
        with self.mutex:
            return self._exchange is not None and self._exchange.may_read(source, header)

    def begin(self, source: int, header: Header, description: bytes) -> tuple[object, list[memoryview]]:
        exchange = self._exchange
        assert exchange is not None
        with self.mutex:
            if self.rank_state.has_aborted:
                raise ConnectionAbortedError("this rank has ended the generation")
            call = exchange.claim(source, header.tag)
        try:
            if call is None:
                message = self._keep(exchange, source, header, description)
                return message, [view_bytes(message.memory)]
            targets = call.begin_value(description)
        except MemoryError as error:
            self._refuse(error)
            raise ConnectionAbortedError("there is no memory for what it sends") from None
        if call.nbytes != header.nbytes:
            raise ValueError(f"a message of {header.nbytes} bytes that describes {call.nbytes}")
        return call, [view_bytes(target) for target in targets]

    def _keep(self, exchange: MessageExchange, source: int, header: Header, description: bytes) -> KeptMessage:
        """Make room for a message that no receive waits for."""
        with self.mutex:
            kept = exchange.kept_bytes
            if not exchange.try_keep(measure_kept(header)):
                told = rank_messages.Unclaimed(exchange.generation, source, header.tag, header.nbytes, kept)
                self._send_now(told.encode())
                raise ConnectionAbortedError(
                    f"{kept} bytes of messages that no recv has asked for wait here, and {exchange.most_kept} may"
                )
        return KeptMessage(header.tag, description, make_memory(header.nbytes), header.before)

    def finish(self, source: int, taker: object) -> None:
        if isinstance(taker, MessageCall):
            self._complete(taker)
            return
        assert isinstance(taker, KeptMessage) and self._exchange is not None
        with self.mutex:
            call = self._exchange.pair(source, taker)
        if call is not None:
            self._deliver(call, taker)

    def on_sent(self, sender: object) -> None:
        assert isinstance(sender, MessageCall)
        self._complete(sender)

    def on_advanced(self) -> None:
        self.callbacks.dispatch()

    def on_broken(self, peer: int, why: str, is_outgoing: bool) -> None:
        if self._exchange is not None:
            self._exchange.broken.append(BrokenLink(peer, why, monotonic(), is_outgoing))

    def on_failure(self, error: BaseException) -> None:
        self._on_own_failure(error)

    def look(self) -> bool:
        self.poll()
        exchange = self._exchange
        if exchange is None:
            return False
        self._check_broken(exchange)
        with self.mutex:
            if not exchange.short_receives:
                exchange.resume_held()
        return bool(exchange.broken)

    def _check_broken(self, exchange: MessageExchange) -> None:
        """End the generation where a link has ended, and no verdict says why: what was on its way is lost."""
        with self.mutex:
            found = exchange.pop_broken(is_over=self.rank_state.verdict is not None) if exchange.broken else None
        if found is None:
            return
        if not found.is_outgoing or self._is_sending_to(found.peer):  # else its sends have ended: the peer has left
            self.abort(f"the connection with {self.rank_state.group.members[found.peer]} has ended: {found.why}")

    def _is_sending_to(self, peer: int) -> bool:
        calls = [call for call in list(self._calls.values()) if isinstance(call, MessageCall)]
        return any(call.peer == peer and not call.prepared.receives for call in calls)

    # Messages and links over the doorbell

    def _on_offer(self, message: bytes, descriptor: int) -> None:
        """Take a message, or a link. Under the mutex."""
        exchange = self._exchange
        if messages.parse_type(message) is messages.MessageType.RANK_LINK:
            self._take_link(exchange, message, descriptor)
            return
        told = rank_messages.parse_delivery(message)
        slot = self._in_flight.results.open_slot(told)
        is_over = self.rank_state.has_aborted  # one before may have been lost
        if exchange is None or told.generation != exchange.generation or is_over:
            return  # the slot is released
        exchange.count_delivered(told.source)
        kept = KeptMessage.from_slot(told.tag, slot)
        call = exchange.pair(told.source, kept)
        if call is not None:
            exchange.due.append((call, kept))

    def _take_link(self, exchange: MessageExchange | None, message: bytes, descriptor: int) -> None:
        try:
            offer = rank_messages.parse_link_offer(message)
            if descriptor >= 0 and exchange is not None and offer.generation == exchange.generation:
                exchange.most_kept = offer.most_unexpected
                descriptor, given = -1, descriptor
                exchange.links.add(given, offer.peer, is_outgoing=offer.is_outgoing)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _handle(self, message: bytes, descriptor: int) -> Exception | None:
        with contextlib.suppress(messages.MalformedMessage):  # it is refused below
            if message and message[0] == messages.MessageType.WITHDRAWN and self._on_expired(message):
                return None
        failure = super()._handle(message, descriptor)
        self._settle_messages()
        return failure

    def _settle_messages(self) -> None:
        """Copy what has been matched; and let no more be written to memory of calls that have failed."""
        exchange = self._exchange
        if exchange is None:
            return
        while due := exchange.pop_due():
            with exchange.links.stepping:
                if not due[0].complete:
                    self._deliver(*due)
        while (call := exchange.peek_failed()) is not None:
            exchange.links.discard(call)
            exchange.forget_failed(call)  # not before: another thread may have its caller go on
        self.callbacks.dispatch()

    def _on_expired(self, message: bytes) -> bool:
        """The worker says that the time of a receive is over; False: of none of these."""
        told = messages.parse_withdrawal(message)
        call, exchange = self._calls.get(told.instance), self._exchange
        if not isinstance(call, MessageCall) or call.generation != told.generation or exchange is None:
            return False
        with self.mutex:
            call.is_announced, call.is_late = False, True
            if exchange.matcher.withdraw(call):
                self._end_call(call, self.rank_state.make_withdrawal(call, told.code))
        if not call.complete:  # it has begun to come
            self._announcements.announce_overdue(call, call.sender)
        self.callbacks.dispatch()
        return True

    def _receive_last(self, instance: int) -> None:
        call, exchange = self._calls.get(instance), self._exchange
        if not isinstance(call, MessageCall) or exchange is None or not call.prepared.receives:
            return
        end = monotonic() + _LAST_SECONDS
        exchange.links.turns.lead(exchange.links.read)
        while not call.complete and call.is_matched and not exchange.broken and monotonic() < end:
            if not exchange.links.turns.lead(lambda: exchange.links.wait(SIGNAL_CHECK_INTERVAL, None)):
                exchange.links.turns.wait_as_follower(call, ALL_PACKS, end)

    # Waiting

    def _wait(self, call: Call, packs: int, until: float, look: Callable[[Call], None]) -> None:
        if not isinstance(call, MessageCall):
            super()._wait(call, packs, until, look)
            return
        announce_at = call.began + RUN_SECONDS
        try:
            while not call.complete:
                self.check_usable()
                look(call)
                due = math.inf if call.is_announced else announce_at
                expires = call.cutoff - DEADLINE_GRACE if call.expires_here and not call.is_late else call.cutoff
                self._read_links(call, min(until, expires, due, monotonic() + SIGNAL_CHECK_INTERVAL))
                now = monotonic()
                if not call.complete:
                    if not call.is_announced and now >= announce_at:
                        self._announcements.announce(call)
                        announce_at = now + SIGNAL_CHECK_INTERVAL  # there may be no room for the message
                    self._check_times(call, expires, now)
                if now >= until:
                    break
            self._settle_messages()
        except KeyboardInterrupt:
            self.on_interrupt()
            raise

    def _read_links(self, call: MessageCall, end: float) -> None:
        """Read the links until then, or let another thread do so."""
        exchange, seconds = self._exchange, max(0.0, end - monotonic())
        if exchange is None or exchange.links.is_closed:
            self._read_once(end)
            return
        links, spin = exchange.links, self._spin if self._can_spin else None
        if not links.turns.lead(lambda: None if call.complete else links.wait(seconds, spin)):
            links.turns.wait_as_follower(call, ALL_PACKS, end)
        if not call.complete:
            self._settle_messages()
            self._check_broken(exchange)

    def _check_times(self, call: MessageCall, expires: float, now: float) -> None:
        exchange = self._exchange
        if call.expires_here and not call.is_late and now >= expires and exchange is not None:
            call.is_late = True
            self._expire(exchange, call)
        if now >= call.cutoff:
            self._check_cutoff(call)
        elif call.cutoff == math.inf and now >= self._next_ping():
            self._ping()

    def _expire(self, exchange: MessageExchange, call: MessageCall) -> None:
        """The time of a receive is over: it ends alone, unless its message has begun to come."""
        if not self._withdraw(exchange, call, Code.DEADLINE_EXCEEDED) and not call.complete:
            self._announcements.announce_overdue(call, call.sender)

    def _withdraw(self, exchange: MessageExchange, call: MessageCall, code: Code) -> bool:
        """End a receive alone; whether no message was there for it."""
        with self.mutex:
            taken = exchange.matcher.withdraw(call)
        if taken:
            self._on_withdrawn(call, code)
            self.callbacks.dispatch()
        return taken

    def poll(self) -> None:
        super().poll()
        if self._exchange is not None and self._calls:
            self._exchange.links.turns.lead(self._exchange.links.read)
            self._settle_messages()

    def _request_cancel(self, call: Call) -> None:
        if not isinstance(call, MessageCall) or self._exchange is None:
            super()._request_cancel(call)
            return
        self.poll()
        self._withdraw(self._exchange, call, Code.CANCELLED)

    def _await_cancel(self, call: Call) -> None:
        if not isinstance(call, MessageCall):
            super()._await_cancel(call)

    # The end

    def _hear_last_verdict(self) -> None:
        if self._exchange is not None and self.rank_state.verdict is None:
            self._exchange.links.await_sent(_SEND_TIMEOUT)  # short messages, whose sends have ended
        super()._hear_last_verdict()

    def _end_generation(self, verdict: Verdict, within: float) -> None:
        super()._end_generation(verdict, within)
        self._settle_messages()

    def cancel(self, why: str, aborts: bool) -> None:
        super().cancel(why, aborts)
        self._settle_messages()

    def detach(self) -> None:
        if self._exchange is not None:
            self._exchange.links.close()
        super().detach()

    def invalidate_after_fork(self, why: str) -> None:
        super().invalidate_after_fork(why)
        if self._exchange is not None:
            self._exchange.links.forget()
