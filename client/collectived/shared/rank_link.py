"""One rank link: the end of its sender, and that of its receiver. Nothing here waits."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

from collectived_proto.ipc import rank_messages
from collectived_proto.ipc.rank_messages import HEADER_BYTES, Header

_AHEAD_BYTES = 64 << 10  # read at once: most messages take one system call
_STEP_BYTES = 4 << 20  # moved on one link between two looks at the others
_MOST_PARTS = 64  # given to the system at once


class LinkUser(Protocol):
    """Takes what comes over links. Called by the thread that reads them."""

    def take_expected(self, source: int, memory: bytearray, begin: int, end: int) -> int:
        """The length of the message at `begin` if a thread waits for just it, else 0. If all is there, it is taken."""

    def may_read(self, source: int, header: Header) -> bool:
        """Whether a message may be read now: not before those that `source` gave to its worker earlier."""

    def begin(self, source: int, header: Header, description: bytes) -> tuple[object, list[memoryview]]:
        """A message begins; return its taker and the memory for its leaves. May raise ValueError or OSError."""

    def finish(self, source: int, taker: object) -> None:
        """The last byte of a message is there."""

    def on_sent(self, sender: object) -> None:
        """The system has taken all of a message that was queued."""

    def on_advanced(self) -> None:
        """Messages may have been sent, or have come; nothing is being read or sent just now."""

    def on_broken(self, peer: int, why: str, is_outgoing: bool) -> None:
        """A link has ended by an error, or amid a message."""

    def on_failure(self, error: BaseException) -> None:
        """This process could not take something in while no call waited."""

    def look(self) -> bool:
        """Take in messages for which a link is held, or a verdict about a broken one; whether one is still open.

        Called again and again while no call waits.
        """


class OutgoingLink:
    """To one rank. Several threads may send.

    Attributes:
        is_ready: whether its receiver has taken it.
        is_over: whether it has ended.
        is_refusing: whether a message could not be given to it.
        watched_events: the events for which it is watched. is_reported: whether it is known that it is broken.
    """

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self.socket = sock
        self.peer = peer
        self.is_ready = self.is_over = self.is_refusing = self._is_sending = False
        self.watched_events: int = select.EPOLLIN
        self.is_reported = False
        self._lock = threading.Lock()  # over the order of what is sent
        self._queue: deque[tuple[deque[memoryview], object]] = deque()  # the rest of each message, and its sender

    @property
    def is_idle(self) -> bool:
        """Whether the system has all that was sent."""
        return not (self._queue or self.is_refusing)

    @property
    def events(self) -> int:
        return select.EPOLLIN | (select.EPOLLOUT if self._queue else 0)

    def send(self, parts: Sequence[Any], sender: object) -> bool:
        """Send the bytes of these buffers; whether the system has taken all. Else `flush` names the sender once it has.

        Raises:
            OSError: the connection has ended.
        """
        with self._lock:
            self._begin()
            left = deque(memoryview(part) for part in parts)
            sent = not self._queue and self._push(left)
            if not sent:
                self._queue.append((left, sender))
            self._is_sending = False
        return sent

    def send_short(self, parts: list[Any]) -> bool:
        """Send a short message if nothing waits, and copy the rest that the system leaves; False: it is not sent."""
        with self._lock:
            if self.is_over or self._queue:
                return False
            self._begin()
            taken = self._give(parts)
            if taken < sum(map(len, parts)):
                self._queue.append((deque([memoryview(b"".join(parts))[taken:]]), None))
            self._is_sending = False
        return True

    def flush(self) -> list[object]:
        """Send what waits, as far as there is room; the senders whose messages have left. Raises as `send`."""
        sent = []
        with self._lock:
            if self._queue and not self.is_over:
                self._begin()
                while self._queue and self._push(self._queue[0][0]):
                    sent.append(self._queue.popleft()[1])
                self._is_sending = False
        return sent

    def _begin(self) -> None:
        if self._is_sending:
            # An error has ended that, such as that of a handler of a signal: it is not known how much was sent.
            self.is_over = True
        if self.is_over:
            raise ConnectionResetError("the connection has ended")
        self._is_sending = True

    def has(self, sender: object) -> bool:
        """Whether a message of that sender waits."""
        return any(one is sender for _, one in list(self._queue))

    def _push(self, left: deque[memoryview]) -> bool:
        """Whether all of these parts have been taken."""
        while left:
            taken = self._give(list(islice(left, _MOST_PARTS)))
            if not taken and left[0]:
                return False
            while left and taken >= len(left[0]):
                taken -= len(left.popleft())
            if taken:
                left[0] = left[0][taken:]
        return True

    def _give(self, parts: list[Any]) -> int:
        """How many bytes of these the system takes now."""
        try:
            return self.socket.sendmsg(parts)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Read nothing more of what is being sent."""
        self.is_over = True
        with self._lock:
            self._queue.clear()
            self.socket.close()


class IncomingLink:
    """From one rank: message after message, each read as far as it is there.

    Attributes:
        taker: of the message that is being read.
        is_held: whether nothing is read until something else has come.
        is_idle: whether nothing has come yet. is_over: whether it has ended.
        watched_events: the events for which it is watched. is_reported: whether it is known that it is broken.
    """

    def __init__(self, sock: socket.socket, peer: int, user: LinkUser) -> None:
        self.socket = sock
        self.peer = peer
        self.taker: object = None
        self.is_over = self.is_held = False
        self.is_idle = True
        self.watched_events: int = select.EPOLLIN
        self.is_reported = False
        self._user = user
        self._ahead = bytearray(_AHEAD_BYTES)
        self._begin = self._end = 0  # of what has been read ahead, and not been taken
        self._targets: deque[memoryview] = deque()
        self._is_mid_message = self._is_drained = self._is_advancing = False

    @property
    def events(self) -> int:
        return 0 if self.is_held else select.EPOLLIN

    def advance(self) -> None:
        """Read what is there, up to a limit.

        Raises:
            ValueError: it is no message. OSError: the connection has ended, by an error or amid a message.
        """
        if self._is_advancing:  # an error has ended that, such as that of a handler of a signal
            raise ConnectionAbortedError("this process failed while it read")
        budget = _STEP_BYTES
        self._is_advancing, self._is_drained = True, False
        if self._begin == self._end and not (self._is_mid_message or self.is_held or self.is_over):  # as most often
            budget -= self._read_ahead()
        while not (self.is_over or self.is_held):
            if self._is_mid_message and not self._targets:
                taker, self.taker, self._is_mid_message = self.taker, None, False
                self._user.finish(self.peer, taker)
            elif self._is_mid_message or not self._begin_message():
                if self._is_drained or budget <= 0:
                    break
                budget -= self._fill() if self._is_mid_message else self._read_ahead()
        self._is_advancing = False

    def _begin_message(self) -> bool:
        """Begin the next message, if its header and its description are there."""
        there = self._end - self._begin
        if there < HEADER_BYTES:
            return False
        expected = self._user.take_expected(self.peer, self._ahead, self._begin, self._end)
        if expected > there:
            self._make_room(expected)
            return False
        if expected:
            self._begin += expected
            return True
        header = rank_messages.parse_header(self._ahead, self._begin)
        self.is_held = True  # first: while it is asked, what is missing may come
        if not self._user.may_read(self.peer, header):
            return True
        self.is_held = False
        start = self._begin + HEADER_BYTES
        if there < HEADER_BYTES + header.described:
            self._make_room(HEADER_BYTES + header.described)
            return False
        description = bytes(memoryview(self._ahead)[start : start + header.described])
        self.taker, targets = self._user.begin(self.peer, header, description)
        self._begin = start + header.described
        self._targets.extend(target for target in targets if len(target))
        self._is_mid_message = True
        while self._targets and self._begin < self._end:
            target = self._targets[0]
            length = min(len(target), self._end - self._begin)
            target[:length] = memoryview(self._ahead)[self._begin : self._begin + length]
            self._begin += length
            self._advance_targets(length)
        return True

    def _make_room(self, nbytes: int) -> None:
        """Have room for so many bytes, of which a part is there."""
        if nbytes <= len(self._ahead) - self._begin and self._end < len(self._ahead):
            return
        there = self._ahead[self._begin : self._end]
        if nbytes > len(self._ahead):
            self._ahead = bytearray(nbytes)
        self._ahead[: len(there)] = there
        self._begin, self._end = 0, len(there)

    def _read_ahead(self) -> int:
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._ahead):
            self._make_room(0)
        got = self._receive(memoryview(self._ahead)[self._end :])
        self._end += got
        return got

    def _fill(self) -> int:
        got = self._receive(self._targets[0][:_STEP_BYTES])
        self._advance_targets(got)
        return got

    def _advance_targets(self, nbytes: int) -> None:
        if nbytes == len(self._targets[0]):
            self._targets.popleft()
        elif nbytes:
            self._targets[0] = self._targets[0][nbytes:]

    def _receive(self, memory: memoryview) -> int:
        """Bytes received; 0: nothing is there, or the peer has sent all that it will."""
        try:
            got = self.socket.recv_into(memory)
        except BlockingIOError:
            self._is_drained = True
            return 0
        self._is_drained = got < len(memory)
        if not got:
            if self._is_mid_message or self._begin != self._end:
                raise ConnectionResetError("the connection has ended amid a message")
            self.is_over = True
        self.is_idle = False
        return got

    def close(self) -> None:
        """Nothing of what is being read is written to any more."""
        self.is_over = True
        self._targets.clear()
        self.socket.close()
