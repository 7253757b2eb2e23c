"""The carrier of a local rank, as its worker sees it: orders go out, answers come in (`ipc/carrier_orders.py`)."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Callable

from collectived_proto.ipc import carrier_orders as orders
from collectived_proto.ipc.carrier_orders import Answer, AnswerKind
from collectived_proto.ipc.messages import MalformedMessage
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.clients.local_rank import DISCONNECT_ERRORS
from collectived_runtime.transport.link import Link

_MAX_ANSWER = 4096
_UNREAD_BYTES = 16 << 10  # that go in one packet


class Order:
    """An order under way, as a task waits for it.

    Attributes:
        answer: None: there is none yet.
    """

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer: Answer | None = None

    @property
    def done(self) -> bool:
        return self.answer is not None


class RankCarrier:
    """In the group loop's thread.

    Args:
        sock: this worker's end, taken over.
        drop: lets the rank go, and says why.

    Attributes:
        is_answering: False: it has not answered a question since the one before.
    """

    def __init__(self, sock: socket.socket, poller: Poller, drop: Callable[[str], None]) -> None:
        sock.setblocking(False)
        self.is_answering = True
        self._socket = sock
        self._poller = poller
        self._drop = drop
        self._order: Order | None = None
        self._number = -1  # of the instance that it is about
        self._pings = self._pongs = 0
        self._links: dict[int, Link] = {}  # by place, those that it has
        self._outbox: deque[tuple[bytes, int]] = deque()  # messages, and descriptors that ride along or -1
        poller.add(sock.fileno(), select.POLLIN, self._on_event)

    def lend(self, place: int, link: Link, unread: bytes) -> None:
        """Let it read and write a link; `unread` are bytes that have been read of it and belong to its next order."""
        if self._links.get(place) is not link:
            self._send(orders.encode_link(place, b""), link)
            self._links[place] = link
        for at in range(0, len(unread), _UNREAD_BYTES):
            self._send(orders.encode_link(place, unread[at : at + _UNREAD_BYTES]))

    def begin(self, instance: int, message: bytes) -> Order:
        """Send an order about an instance; there is one at a time."""
        self._order, self._number = Order(), instance
        self._send(message)
        return self._order

    def ask(self) -> None:
        """Ask whether it goes on, and note whether it has answered since this was asked last."""
        self.is_answering = self._pongs == self._pings
        if self.is_answering:
            self._pings += 1
            self._send(orders.encode_ping(self._pings))

    def give_up(self, why: str) -> None:
        """Let the rank go: its carrier does not what it must."""
        self._drop(f"its carrier {why}")

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._poller.remove(self._socket.fileno())
            self._socket.close()
        while self._outbox:
            self._drop_first()

    def _send(self, message: bytes, link: Link | None = None) -> None:
        """Send a message, or keep it until there is room: a process that is stopped reads nothing."""
        descriptor = -1 if link is None else link.stream.fileno()
        if self._socket.fileno() < 0 or (not self._outbox and self._try_send(message, descriptor)):
            return
        try:  # a descriptor of its own: the link may have ended before there is room
            self._outbox.append((message, -1 if descriptor < 0 else os.dup(descriptor)))
        except OSError as error:
            self.give_up(f"cannot be lent a link: {error.strerror}")
            return
        self._poller.change(self._socket.fileno(), select.POLLIN | select.POLLOUT)

    def _try_send(self, message: bytes, descriptor: int) -> bool:
        """Send a message; False where there is no room."""
        try:
            if descriptor >= 0:
                socket.send_fds(self._socket, [message], [descriptor])
            else:
                self._socket.send(message)
        except BlockingIOError:
            return False
        except DISCONNECT_ERRORS:  # its end is read in a moment
            pass
        except OSError as error:
            self.give_up(f"cannot be given an order: {error.strerror}")
        return True

    def _flush(self) -> None:
        while self._outbox and self._try_send(*self._outbox[0]):
            self._drop_first()
        if not self._outbox and self._socket.fileno() >= 0:
            self._poller.change(self._socket.fileno(), select.POLLIN)

    def _drop_first(self) -> None:
        _, descriptor = self._outbox.popleft()
        if descriptor >= 0:
            os.close(descriptor)

    def _on_event(self, events: int) -> None:
        if events & select.POLLOUT:
            self._flush()
        if events & ~select.POLLOUT:
            self._read()

    def _read(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                data = self._socket.recv(_MAX_ANSWER)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:  # if its process is over, its doorbell says so first
                self.close()
                if self._order is not None:
                    self._order.answer = Answer(AnswerKind.REFUSED, 0, 0, self._number, b"")
                return
            try:
                self._take(orders.parse_answer(data))
            except MalformedMessage as error:
                self.give_up(f"sent something malformed: {error}")
                return

    def _take(self, answer: Answer) -> None:
        if answer.kind is AnswerKind.PONG:
            if answer.number != self._pongs + 1 or answer.number > self._pings:
                raise MalformedMessage(f"an answer to question {answer.number}, which was not asked")
            self._pongs = answer.number
            return
        if self._order is None or answer.number != self._number:
            raise MalformedMessage(f"an answer about instance {answer.number}, for which there is no order")
        self._order.answer, self._order = answer, None


def connect_carrier(
    poller: Poller, offer: Callable[[socket.socket], object], drop: Callable[[str], None]
) -> RankCarrier | None:
    """Make the socket for the orders to a carrier.

    Args:
        offer: sends the rank its end, which is closed then; may raise OSError.

    Returns:
        None: there are no descriptors for that.
    """
    with contextlib.suppress(OSError):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            offer(theirs)
            undo.pop_all()
        return RankCarrier(ours, poller, drop)
    return None
