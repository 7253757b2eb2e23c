"""A floor: one process per rank, plain TCP sockets over the loopback, and the bytes that a ring all-reduce moves.

2 (n - 1) steps; in each, a rank sends one n-th of the buffer to the next rank and gets as much from the one before, and
a step begins when the last one is done, as what it sends is what came. Nothing is added up.
"""

from __future__ import annotations

import os
import select
import socket

from benchmarks.cases import Array, Case

BUFFER = 4 << 20


class Sockets:
    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        port = int(os.environ["MASTER_PORT"])
        with _listen(port + self.rank) as listener:
            self.next = _dial(port + (self.rank + 1) % self.size)
            self.previous, _ = listener.accept()
        for connection in (self.next, self.previous):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
        self.versions: dict[str, str] = {}

    def trial(self, case: Case, variant: str) -> Moving:
        return Moving(self, case)

    def close(self) -> None:
        self.next.close()
        self.previous.close()


class Moving:
    in_place = False

    def __init__(self, peer: Sockets, case: Case) -> None:
        self._peer = peer
        self._chunk = memoryview(bytearray(max(1, case.size // peer.size)))
        self._arrived = memoryview(bytearray(len(self._chunk)))

    def fill(self, base: Array, factor: float) -> None:
        """There is nothing to be added up."""

    def call(self) -> None:
        for _ in range(2 * (self._peer.size - 1)):
            _exchange(self._peer.next, self._peer.previous, self._chunk, self._arrived)

    def results(self) -> list[Array]:
        return []


def _exchange(outward: socket.socket, inward: socket.socket, data: memoryview, room: memoryview) -> None:
    sent = received = 0
    while sent < len(data) or received < len(room):
        idle = True
        if sent < len(data):
            try:
                sent += outward.send(data[sent:])
                idle = False
            except BlockingIOError:
                pass
        if received < len(room):
            try:
                received += inward.recv_into(room[received:])
                idle = False
            except BlockingIOError:
                pass
        if idle:
            waiting = select.poll()
            if sent < len(data):
                waiting.register(outward, select.POLLOUT)
            if received < len(room):
                waiting.register(inward, select.POLLIN)
            waiting.poll()


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


def _dial(port: int) -> socket.socket:
    while True:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        try:
            connection.connect(("127.0.0.1", port))
            return connection
        except ConnectionRefusedError:
            connection.close()  # its listener is not there yet


def start() -> Sockets:
    return Sockets()
