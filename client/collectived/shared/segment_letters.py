"""Sends and receives between ranks that meet in a segment: letters of the native core.

A letter begins with a description of its value. A receive expects what the one before it at the same line has brought,
and takes it in one step; where something else comes, it makes room for that first.
"""

from __future__ import annotations

import math
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from time import monotonic

import numpy as np

from collectived.calls.prepare import PreparedCall
from collectived.calls.timeout import DEADLINE_GRACE
from collectived.shared.message_forms import describe_value, make_form, parse_description
from collectived.shared.segment_call import STOP_NANOSECONDS, LetterForm, PointToPointCall
from collectived.values import nest
from collectived.values.leaves import Array
from collectived_native import core
from collectived_proto import root_value
from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.types import ANY_SOURCE, Collective, Recv, Send, Verdict

_PLAIN, _COMPRESSED, _APART = b"\0", b"\1", b"\2"  # how a value is described; apart: by the first bytes of the letter
_LENGTHS = struct.Struct("<QQ")  # of such a description, and of all of the letter
_BUSY_SECONDS = 1.0  # since the last asynchronous call, in which others are likely
_LEAST_SECONDS = 1e-6  # left of a deadline that has passed
_LOOK_NANOSECONDS = 1_000_000
_LAST_SECONDS = 2.0  # for all of a letter that is being read when a verdict comes


class LetterProgram:
    """A prepared send or receive in one engine.

    Attributes:
        peer, tag: where letters go to, or come from.
        known: what is sent and its description; of a receive, what came last.
        preface: the description as a first array of the letter, where it is too long for a blob.
    """

    def __init__(self, engine: core.Engine, prepared: PreparedCall) -> None:
        operation = prepared.collective.operation
        assert isinstance(operation, (Send, Recv))
        self.engine = engine
        self.sends = isinstance(operation, Send)
        self.peer = operation.to if isinstance(operation, Send) else operation.source
        if self.peer == ANY_SOURCE:
            self.peer = -1  # the core's word for it
        self.tag = operation.tag
        self.known: tuple[LetterForm, bytes] | None = None
        self.preface: tuple[Array, ...] = ()
        if self.sends:
            blob, self.preface = _describe(prepared.collective)
            self.known = make_form(prepared.collective, sends=True), blob


class LetterCall(PointToPointCall):
    """
    Attributes:
        is_cancelled: whether its caller has taken it back, if nothing had come for it by then.
    """

    __slots__ = ("_description_bytes", "_whole", "is_cancelled")

    def __init__(self, prepared: PreparedCall, arrays: list[Array], spec: nest.Spec) -> None:
        super().__init__(prepared, arrays, spec)
        self.is_cancelled = False
        self._whole: Array | None = None  # a letter that begins with its description
        self._description_bytes = 0

    def start(self, engine: core.Engine, nanoseconds: int) -> core.Job | None:
        """Send it, or receive within so many nanoseconds, 0 for any; None where that is done at once."""
        program = self.prepared.segment_program
        if not isinstance(program, LetterProgram) or program.engine is not engine:
            program = self.prepared.segment_program = LetterProgram(engine, self.prepared)
        mode = core.NOTIFYING if self.is_async else core.BLOCKING
        if program.known is None:
            return engine.receive(program.peer, program.tag, None, nanoseconds, None, mode)
        form, blob = program.known
        inputs, outputs = self.make_buffers(form)
        if program.sends:
            return engine.send(program.peer, program.tag, program.preface + inputs, 0, blob, mode)
        return engine.receive(program.peer, program.tag, outputs, nanoseconds, blob, mode)

    def await_last(self, job: core.Job) -> int:
        """Return its state once the core has looked what there is for it, and has read that."""
        state, end = job.wait(_LOOK_NANOSECONDS), monotonic() + _LAST_SECONDS
        while (state == core.KNOCK or (state == core.PENDING and job.source() >= 0)) and monotonic() < end:
            state = job.wait(STOP_NANOSECONDS)
        return state

    def describe(self, job: core.Job) -> None:
        (blob,) = job.blobs()
        if blob[:1] == _APART:
            self._description_bytes, nbytes = _LENGTHS.unpack_from(blob, 1)
            self._whole = np.empty(nbytes, np.uint8)
            job.describe(None, (), (self._whole,))
            return
        form = _parse_blob(blob)
        program = self.prepared.segment_program
        assert isinstance(program, LetterProgram)
        program.known = form, blob
        job.describe(None, (), self.make_buffers(form)[1])

    def unpack(self) -> None:
        """Take a letter apart that began with its description.

        Raises:
            ValueError: it is none.
        """
        whole, at, self._whole = self._whole, self._description_bytes, None
        if whole is None:
            return
        form = _parse(whole[:at].tobytes())
        self.make_buffers(form)
        if at + sum(result.nbytes for result in self._results) != len(whole):
            raise ValueError("a letter that is not as long as it says")
        for result in self._results:
            result[...] = whole[at : at + result.nbytes].view(result.dtype).reshape(result.shape)
            at += result.nbytes

    def find_withdrawal(self, state: int) -> Code | None:
        """Where by this state of its job it has ended alone: with which code."""
        if state == core.EXPIRED:
            return Code.DEADLINE_EXCEEDED
        return Code.CANCELLED if state == core.CANCELLED and self.is_cancelled else None

    @property
    def expires_here(self) -> bool:
        return self.prepared.receives  # alone, by the clock of the core

    def end(self, verdict: Verdict | None = None, retire: bool = False) -> None:
        super().end(verdict, retire)
        if verdict is not None and self.is_running and self.job is not None:
            self.job.abandon()


class Announcements:
    """Announces to a worker which sends and receives of a rank wait. The worker watches their deadlines.

    Args:
        mutex: the lock of the rank's channel.
        send: sends a message on the doorbell if there is room, under that lock.
    """

    def __init__(self, mutex: threading.Lock, send: Callable[[bytes], bool]) -> None:
        self._mutex = mutex
        self._send = send
        self._young: deque[PointToPointCall] = deque()  # asynchronous ones that have not waited for long
        self._grew_at = -math.inf  # by the monotonic clock
        self._rests = False  # whether no thread will look at those soon

    def add(self, call: PointToPointCall) -> bool:
        """An asynchronous call does not end at once; whether no thread will announce it in time: `announce_young`."""
        call.began = monotonic()
        with self._mutex:
            self._young.append(call)
            self._grew_at = call.began
            return self._rests

    def announce(self, call: PointToPointCall) -> None:
        left = call.cutoff - DEADLINE_GRACE - monotonic()
        remaining = 0.0 if left == math.inf or call.expires_here else max(left, _LEAST_SECONDS)
        submit = messages.Submit(
            call.generation, call.prepared.id, call.instance, remaining, False, (), timeout=call.timeout, watched=True
        )
        with self._mutex:  # once it has been said that it has ended, nothing more is said of it
            if not (call.is_announced or call.complete):
                call.is_announced = self._send(submit.encode())

    def announce_overdue(self, call: PointToPointCall, source: int) -> None:
        """By its deadline only a part of what a receive takes has come."""
        self.announce(call)
        with self._mutex:
            if not call.complete:
                self._send(messages.OverdueReceive(call.generation, call.instance, source).encode())

    def announce_old(self, after: float) -> bool:
        """Announce asynchronous calls that have waited for so many seconds; whether to look again as soon.

        Also for a while after the last one: else each call of a program that often waits for one would be announced.
        """
        are_left = self.announce_young(after)
        with self._mutex:
            self._rests = not are_left and monotonic() - self._grew_at > _BUSY_SECONDS
            return not self._rests

    def announce_young(self, after: float = 0.0) -> bool:
        """Announce asynchronous calls that have waited for so many seconds; whether there are others."""
        while True:
            with self._mutex:
                young = self._young
                if not young or not (young[0].complete or monotonic() - young[0].began >= after):
                    return bool(young)
                call = young.popleft()
            self.announce(call)
            if not (call.is_announced or call.complete):  # there was no room for the message
                with self._mutex:
                    young.append(call)
                return True


def _describe(collective: Collective) -> tuple[bytes, tuple[Array, ...]]:
    """The description of a value for its receiver: a blob, or an array before all others where it is too long."""
    described = describe_value(collective)
    if len(described) < core.MAX_LETTER_BLOB:
        return _PLAIN + described, ()
    described = _COMPRESSED + zlib.compress(described, 1)
    if len(described) <= core.MAX_LETTER_BLOB:
        return described, ()
    nbytes = len(described) + sum(leaf.nbytes for leaf in collective.leaves)
    return _APART + _LENGTHS.pack(len(described), nbytes), (np.frombuffer(described, np.uint8),)


@lru_cache(maxsize=1024)
def _parse_blob(described: bytes) -> LetterForm:
    return _parse(described)  # the same ones come again and again; those that take more than a blob are not kept


def _parse(described: bytes) -> LetterForm:
    """
    Raises:
        ValueError: these bytes describe no value.
    """
    text = described[1:]
    if described[:1] == _COMPRESSED:
        try:
            text = zlib.decompressobj().decompress(text, root_value.MAX_BYTES)
        except zlib.error as error:
            raise ValueError(f"a description that cannot be read: {error}") from None
    return parse_description(text)
