"""Blocking sends and receives of one short array over rank links, without a call: nothing of them has to wait long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, Protocol

import numpy as np

from collectived.calls.call import Call
from collectived.calls.channel import NOT_REPEATED
from collectived.shared.message_call import SHORT_BYTES, SendProgram, make_short_value, may_be_filled, view_bytes
from collectived.shared.message_exchange import MessageExchange
from collectived.shared.segment_repeats import RUN_SECONDS
from collectived_native import core
from collectived_proto.ipc.spin import AdaptiveSpin
from collectived_proto.types import Operation, Recv, Send

_MAX_SENDS = 1024  # values whose description is kept


class MessageHost(Protocol):
    """The channel of a rank."""

    mutex: Any

    def find_exchange(self) -> MessageExchange | None:
        """That of this generation, if it goes on."""

    def count_message(self, kind: int, nbytes: int, began: float) -> None:
        """A send or receive has completed."""


class ShortMessages:
    """Of one rank.

    Args:
        spin: how a thread looks before it sleeps; None: it sleeps at once.
    """

    def __init__(self, host: MessageHost, spin: AdaptiveSpin | None) -> None:
        self._host = host
        self._spin = spin
        self._sends: dict[tuple[Operation, np.dtype[Any], tuple[int, ...]], SendProgram] = {}

    def remember(self, call: Call, operation: Operation, value: Any) -> None:
        """A send has ended well: others like it need no call."""
        program = call.prepared.segment_program
        if not isinstance(program, SendProgram) or type(value) is not np.ndarray:
            return
        if value.nbytes <= SHORT_BYTES and value.dtype.isnative:
            if len(self._sends) >= _MAX_SENDS:
                self._sends.clear()
            self._sends[operation, value.dtype, value.shape] = program

    def send(self, operation: Send, value: Any) -> Any:
        """Send an array like one that was sent before; NOT_REPEATED: it needs a call."""
        exchange = self._host.find_exchange()
        if type(value) is not np.ndarray or exchange is None:
            return NOT_REPEATED
        program = self._sends.get((operation, value.dtype, value.shape))
        link = exchange.links.find_ready(operation.to)
        if program is None or link is None or not value.flags.c_contiguous:
            return NOT_REPEATED
        began = monotonic()
        parts: list[Any] = [program.make_head(exchange.given[operation.to])]
        if program.nbytes:
            parts.append(view_bytes(value))
        if not exchange.links.send_short(link, parts):
            return NOT_REPEATED
        self._host.count_message(core.SENDS, program.nbytes, began)
        return None

    def receive(self, operation: Recv, out: Any) -> Any:
        """Take a message of one array that comes soon; NOT_REPEATED: it needs a call."""
        began = monotonic()
        end = began + RUN_SECONDS
        key: Any = operation if out is None else (operation, out.dtype, out.shape) if may_be_filled(out) else None
        while (exchange := self._host.find_exchange()) is not None:
            with self._host.mutex:
                message = exchange.find(operation)
                found = None if message is None else make_short_value(message, out)
                if message is not None and found is not None:
                    exchange.take(operation)
                    exchange.remember(operation, key, message.head, found)
                    self._host.count_message(core.RECEIVES, message.nbytes, began)
                    return found
            expected = None
            try:
                if message is None:
                    with self._host.mutex:
                        expected = exchange.expect(operation, key, out)
                goes_on = message is None and self._wait(exchange, end - monotonic())
            finally:
                if expected is not None and not expected.is_there:
                    with self._host.mutex:  # another thread may be about to fill it
                        exchange.forget_expected()
            if expected is not None and expected.is_there:
                self._host.count_message(core.RECEIVES, expected.array.nbytes, began)
                return expected.array
            if not goes_on:
                return NOT_REPEATED
        return NOT_REPEATED

    def _wait(self, exchange: MessageExchange, seconds: float) -> bool:
        """Read the links for so long at most; False: it is in vain."""
        wait: Callable[[], None] = partial(exchange.links.wait, seconds, self._spin)
        if seconds <= 0 or not exchange.links.has_incoming:
            return False
        exchange.short_receives += 1
        try:
            is_leader = exchange.links.turns.lead(wait)  # else another thread reads, for calls
        finally:
            exchange.short_receives -= 1
        wants_call, exchange.wants_call = exchange.wants_call, False
        return is_leader and not wants_call
