"""Carriers in this process, joined by streams, and what their workers say to them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from tests.native.ranks import LIMIT_SECONDS, Array

from collectived_native import core
from collectived_proto.types import DType

RUN, MOVE = struct.Struct("<BxxxIQiiqQQ"), struct.Struct("<BBBBIIxxxxQQ64s")
LINK = struct.Struct("<BxxxIQ")
SHORT, ANSWER = struct.Struct("<BxxxxxxxQ"), struct.Struct("<BxxxIixxxxQ64s")
VALUE, SCRATCH, RESULT, NOTHING, NOBODY = 0, 1, 2, 255, (1 << 32) - 1
SUM, MEAN = 1, 2
F32 = int(DType.FLOAT32)
INSTANCE = 7


def make_header(number: int) -> bytes:
    return bytes([number]) * 64


def aim_at(element: int) -> bytes:
    return element.to_bytes(8, "little") + bytes(56)


def make_move(
    kind: int,
    memory: int,
    at: int,
    elements: int,
    *,
    round: int = 0,
    peer: int = 0,
    mine: int = NOTHING,
    left: bool = False,
    header: bytes = b"",
) -> bytes:
    return MOVE.pack(kind, memory, mine, left, round, peer, at, elements, header or make_header(round + 1))


def make_run(
    moves: Sequence[bytes],
    *,
    instance: int = INSTANCE,
    dtype: int = F32,
    op: int = SUM,
    divisor: int = 1,
    scratch: int = 0,
    row: int = 4,
) -> bytes:
    order = RUN.pack(core.ORDER_RUN, len(moves), instance, dtype, op, divisor, scratch, row)
    return order + b"".join(moves)


@dataclass(frozen=True)
class Answer:
    kind: int
    peer: int
    error: int
    number: int


class Rank:
    """A carrier, and its worker's end of the orders."""

    def __init__(self) -> None:
        self.worker, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.worker.settimeout(LIMIT_SECONDS)
        self.carrier = core.carrier(theirs.detach())
        self.header = b""  # of the last answer

    def order(self, order: bytes) -> None:
        self.worker.send(order)

    def hear(self) -> Answer:
        *facts, self.header = ANSWER.unpack(self.worker.recv(2 * ANSWER.size))
        return Answer(*facts)

    def link(self, peer: int, stream: socket.socket | None, unread: bytes = b"") -> None:
        """Have it take over a link, if there is one, and bytes that have been read of it; there is no answer."""
        order = LINK.pack(core.ORDER_LINK, peer, len(unread)) + unread
        if stream is None:
            self.worker.send(order)
            return
        with stream:
            socket.send_fds(self.worker, [order], [stream.fileno()])

    def ask(self, order: bytes) -> Answer:
        self.order(order)
        return self.hear()

    def ping(self, number: int) -> None:
        assert self.ask(SHORT.pack(core.ORDER_PING, number)) == Answer(core.ANSWER_PONG, NOBODY, 0, number)

    def close(self) -> None:
        self.carrier.close()
        self.worker.close()


Make = Callable[..., list[Rank]]
Lonely = tuple[Rank, socket.socket]


def make_streams(kind: str) -> tuple[socket.socket, socket.socket]:
    """The two ends of a link."""
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def join(ranks: Sequence[Rank], kind: str) -> None:
    for me, rank in enumerate(ranks):
        for peer in range(me):
            near, far = make_streams(kind)
            rank.link(peer, near)
            ranks[peer].link(me, far)


@contextmanager
def keep_ranks() -> Iterator[Make]:
    """Make ranks that are joined to each other, and close them in the end."""
    made: list[Rank] = []

    def make(count: int, kind: str = "tcp") -> list[Rank]:
        ranks = [Rank() for _ in range(count)]
        made.extend(ranks)
        join(ranks, kind)
        return ranks

    yield make
    for rank in made:
        rank.close()


@contextmanager
def play_peer() -> Iterator[Lonely]:
    """A rank whose peer 1 is the test, with the test's end of their link."""
    with keep_ranks() as make:
        rank = make(1)[0]
        near, far = make_streams("tcp")
        rank.link(1, near)
        with far:
            far.settimeout(LIMIT_SECONDS)
            yield rank, far


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def offer(rank: Rank, value: Array | None, result: Array | None, staging: Array | None = None) -> None:
    rank.carrier.offer(INSTANCE, value, result, staging)


def done(instance: int = INSTANCE) -> Answer:
    return Answer(core.ANSWER_DONE, NOBODY, 0, instance)


def stall(rank: Rank, value: Array | None = None) -> Array:
    """Have the rank begin what cannot go on: nobody sends to it."""
    result = np.zeros(1000, np.float32)
    offer(rank, value, result)
    rank.order(make_run([make_move(core.MOVE_RECEIVE, RESULT, 0, 1000, peer=1)]))
    rank.ping(3)
    return result
