"""A proxy of the drills: between workers, or between a worker and the coordinator, it does to bytes what networks do.

Every connection that comes to one of its doors is continued to where the door leads. Each direction is a *flow* with a
thread of its own; a flow that is *framed* knows where frames begin and end, so that a fault can come in the middle of
one. A fault is armed and comes about when the next bytes reach the place for which it was meant.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from collectived_runtime.transport import hello
from collectived_runtime.transport.frame import HEADER_BYTES, BadFrame, parse

_PIECE = 1 << 16
_LENGTH = struct.Struct("<I")  # the last field of a frame's header
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing is resetting
GARBAGE = bytes(range(256))


class Place(enum.Enum):
    """Where in a flow a fault comes about."""

    ANYWHERE = "anywhere"
    BETWEEN = "between two frames"
    HEADER = "in the middle of a header"
    PAYLOAD = "in the middle of a payload"


class Act(enum.Enum):
    HOLD = "nothing more is read until it is released"
    DROP = "what comes is read and thrown away"
    RESET = "the connection is reset"
    CLOSE = "the connection is closed"
    GARBAGE = "bytes that mean nothing are put in"


@dataclass(frozen=True, slots=True)
class Fault:
    act: Act
    place: Place = Place.ANYWHERE


class Framing:
    """Where the frames of one direction begin and end, after so many bytes of handshake. Pure.

    After a farewell with which a connection is kept another handshake follows.
    """

    def __init__(self, handshake: int) -> None:
        self._handshake = handshake
        self.handshakes = 1  # that have begun, or are to come next
        self._unit = handshake  # bytes of the unit that is passing: handshake, header or payload
        self._done = 0
        self._header = bytearray()
        self._kind = Place.ANYWHERE

    def split(self, data: bytes) -> Iterator[tuple[Place, bytes]]:
        """The data in pieces; with each the place at which it begins."""
        while data:
            middle = self._unit // 2
            place = Place.ANYWHERE
            if self._kind is Place.HEADER and self._done == 0:
                place = Place.BETWEEN
            elif self._kind is not Place.ANYWHERE and self._done == middle > 0:
                place = self._kind
            end = middle if self._done < middle else self._unit
            piece, data = data[: end - self._done], data[end - self._done :]
            yield place, piece
            self._advance(piece)

    def _advance(self, piece: bytes) -> None:
        self._done += len(piece)
        if self._kind is Place.HEADER:
            self._header += piece
        if self._done < self._unit:
            return
        length, over = 0, False
        if self._kind is Place.HEADER:
            length = _LENGTH.unpack_from(self._header, HEADER_BYTES - _LENGTH.size)[0]
            with contextlib.suppress(BadFrame):
                over = parse(self._header).keeps_connection
            self._header.clear()
        self._kind, self._unit = (Place.PAYLOAD, length) if length else (Place.HEADER, HEADER_BYTES)
        if over:
            self._kind, self._unit = Place.ANYWHERE, self._handshake
            self.handshakes += 1
        self._done = 0


class _Cut(Exception):
    """The connection is over."""


class Flow:
    """One direction of a connection."""

    def __init__(self, connection: Connection, source: socket.socket, sink: socket.socket, framing: Framing | None):
        self._connection = connection
        self._source = source
        self._sink = sink
        self._framing = framing
        self._fault: Fault | None = None
        self._free = threading.Event()  # not held
        self._free.set()
        self.faulted = threading.Event()  # the fault has come about
        self.said = b""  # the first words, or those after the last farewell, enough to know a link by
        self._heard = 1  # handshakes
        self.thread = threading.Thread(target=self._run, daemon=True)

    def arm(self, fault: Fault) -> None:
        self.faulted.clear()
        if fault.act is Act.HOLD:
            self._free.clear()
        self._fault = fault

    def release(self) -> None:
        """Lets everything pass again."""
        self._fault = None
        self._free.set()

    def _run(self) -> None:
        with contextlib.suppress(_Cut, OSError):
            while data := self._receive():
                for place, piece in self._framing.split(data) if self._framing else [(Place.ANYWHERE, data)]:
                    self._hear(piece)
                    self._pass(place, piece)
            self._sink.shutdown(socket.SHUT_WR)
            return
        self._connection.cut(reset=True)

    def _receive(self) -> bytes:
        self._connection.wait(self._source, select.POLLIN)
        return self._source.recv(_PIECE)

    def _hear(self, piece: bytes) -> None:
        if self._framing is not None and self._framing.handshakes != self._heard:
            self._heard, self.said = self._framing.handshakes, b""
        self.said += piece[: hello.HELLO_BYTES - len(self.said)]

    def _pass(self, place: Place, piece: bytes) -> None:
        fault = self._fault
        if fault is not None and fault.place in (Place.ANYWHERE, place):
            self.faulted.set()
            match fault.act:
                case Act.HOLD:
                    while not self._free.wait(0.05):
                        if self._connection.over:
                            raise _Cut
                case Act.DROP:
                    return
                case Act.GARBAGE:
                    self._fault = None
                    piece = GARBAGE + piece
                case Act.RESET | Act.CLOSE:
                    self._connection.cut(reset=fault.act is Act.RESET)
                    raise _Cut
        while piece:
            self._connection.wait(self._sink, select.POLLOUT)
            piece = piece[self._sink.send(piece) :]


class Connection:
    """A connection that passes through, with its two flows."""

    def __init__(self, near: socket.socket, far: socket.socket, framed: bool) -> None:
        self.near, self.far = near, far
        for sock in (near, far):
            sock.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ending = threading.Lock()
        self.over = False
        self._reset = False
        out = Framing(hello.HELLO_BYTES + hello.PROOF_BYTES) if framed else None
        back = Framing(hello.ANSWER_BYTES) if framed else None
        self.flows = (Flow(self, near, far, out), Flow(self, far, near, back))
        self._reaper = threading.Thread(target=self._reap, daemon=True)
        self._reaper.start()

    def wait(self, sock: socket.socket, events: int) -> None:
        poll = select.poll()
        poll.register(sock, events)
        poll.register(self._wake, select.POLLIN)
        if any(descriptor == self._wake for descriptor, _ in poll.poll()):
            raise _Cut

    def cut(self, reset: bool = True) -> None:
        """Ends it on both sides."""
        with self._ending:
            if not self.over:
                self._reset = reset
                self.over = True
                os.eventfd_write(self._wake, 1)

    @property
    def hello(self) -> hello.LinkHello | None:
        """Which link this is, once that has been said."""
        said = self.flows[0].said
        return hello.parse(said) if len(said) == hello.HELLO_BYTES else None

    def join(self) -> None:
        self._reaper.join(5)

    def _reap(self) -> None:
        for flow in self.flows:
            flow.thread.start()
        for flow in self.flows:
            flow.thread.join()
        with self._ending:
            self.over = True
            os.close(self._wake)
        for sock in (self.near, self.far):
            if self._reset and sock.family != socket.AF_UNIX:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()


class Door:
    """Listens at one address and continues every connection to `leads_to()`, asked anew for each.

    Args:
        listen: a path, or '' for a TCP port of loopback.
        leads_to: a path, or (host, port).
        framed: connections are links between workers; the `hello` of each says which.
    """

    def __init__(self, listen: str, leads_to: Callable[[], str | tuple[str, int]], framed: bool = False) -> None:
        self._leads_to = leads_to
        self._framed = framed
        self._connections: list[Connection] = []
        self._changing = threading.Lock()
        self.closed = False  # nobody gets through
        self.refused = 0  # how many did not
        self._path = listen
        if listen:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(listen)
            self._socket.listen(64)
            self.address = f"unix:{listen}"
        else:
            self._socket = socket.create_server(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def connections(self) -> list[Connection]:
        """Those that pass now."""
        with self._changing:
            self._connections = [connection for connection in self._connections if not connection.over]
            return list(self._connections)

    @property
    def flows(self) -> list[Flow]:
        return [flow for connection in self.connections for flow in connection.flows]

    def shut(self) -> None:
        """Lets nobody through, and cuts who is."""
        self.closed = True
        for connection in self.connections:
            connection.cut()

    def open(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.shut()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._socket.close()
        for connection in self._connections:
            connection.join()
        if self._path:
            Path(self._path).unlink()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._socket.accept()
            except OSError:
                return
            target = self._leads_to()
            far = socket.socket(socket.AF_UNIX if isinstance(target, str) else socket.AF_INET, socket.SOCK_STREAM)
            try:
                if self.closed:
                    raise ConnectionRefusedError
                far.connect(target)
            except OSError:
                self.refused += 1
                near.close()
                far.close()
                continue
            for sock in (near, far):
                if sock.family == socket.AF_INET:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changing:
                self._connections.append(Connection(near, far, self._framed))
