"""Guests of the connection server: so many that have not said who they are, so fast, never at the cost of those
expected.
"""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collectived_proto.ipc import messages
from collectived_runtime.limits.login_throttle import LoginThrottle
from collectived_runtime.limits.rate_limit import Rate
from collectived_runtime.limits.rejections import Limit, MessageSource, RejectionCounters
from collectived_runtime.transport import connections as reception_
from collectived_runtime.transport import listener
from collectived_runtime.transport.connections import ConnectionServer
from collectived_runtime.transport.hello import (
    ANSWER_BYTES,
    HELLO_BYTES,
    NONCE_BYTES,
    LinkHello,
    NoRoom,
    encode_no_room,
    proof,
)
from collectived_runtime.transport.listener import AcceptLimits

SECRET = "of these tests"
MOST = 5


class Place:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.door = str(folder / "door")
        self.refusals = RejectionCounters()
        self.reception = ConnectionServer(
            0, SECRET, self.door, ("127.0.0.1", 0), AcceptLimits(self.refusals, **options)
        )
        self.guests: list[socket.socket] = []

    def knock(self) -> socket.socket:
        guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guest.connect(self.door)
        return self._kept(guest)

    def dial(self) -> socket.socket:
        return self._kept(socket.create_connection(("127.0.0.1", self.reception.link_port), 20))

    def _kept(self, guest: socket.socket) -> socket.socket:
        guest.settimeout(20)
        self.guests.append(guest)
        return guest

    def close(self) -> None:
        for guest in self.guests:
            guest.close()
        self.reception.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def one(**options: Any) -> Place:
        made.append(Place(tmp_path, **options))
        return made[-1]

    yield one
    for place in made:
        place.close()


def waits(guest: socket.socket) -> bool:
    """Whether nothing has been said to it, nor was it closed."""
    guest.setblocking(False)
    try:
        return bool(guest.recv(1))
    except BlockingIOError:
        return True


@pytest.mark.parametrize("way", [Place.knock, Place.dial])
def test_of_too_many_the_oldest_goes(make: Callable[..., Place], way: Callable[[Place], socket.socket]) -> None:
    place = make(max_pending=MOST)
    guests = [way(place) for _ in range(3 * MOST)]
    assert [guest.recv(1) for guest in guests[: 2 * MOST]] == [b""] * 2 * MOST
    assert all(waits(guest) for guest in guests[2 * MOST :])
    assert place.refusals.limit_counts == {Limit.HANDSHAKES: 2 * MOST}


def test_the_expected_come_in_while_others_are_silent(make: Callable[..., Place]) -> None:
    place = make(max_pending=MOST)
    arrived: queue.Queue[Any] = queue.Queue()
    for _ in range(4 * MOST):
        place.knock(), place.dial()
    token = os.urandom(messages.TOKEN_BYTES)
    place.reception.admit(token, arrived.put)
    place.knock().send(messages.encode_hello(token))
    arrived.get(timeout=20).close()
    place.reception.expect_links([(7, 8, 1, 0)], arrived.put)
    guest, said = place.dial(), LinkHello(1, 0, 7, 8, 0, os.urandom(NONCE_BYTES)).encode()
    guest.sendall(said)
    nonce = guest.recv(ANSWER_BYTES, socket.MSG_WAITALL)[:NONCE_BYTES]
    guest.sendall(proof(SECRET, "dial", said, nonce))
    arrived.get(timeout=20).close()


def test_those_at_one_entrance_do_not_push_out_those_at_the_other(make: Callable[..., Place]) -> None:
    place = make(max_pending=MOST)
    first = place.knock()
    for _ in range(2 * MOST):
        assert place.dial()
    assert place.guests[1].recv(1) == b"" and waits(first)


def test_the_silent_are_shown_out_in_time_and_counted(
    make: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception_, "HANDSHAKE_SECONDS", 0.1)
    place = make()
    guests = [place.knock(), place.dial(), place.dial()]
    assert [guest.recv(1) for guest in guests] == [b""] * 3
    assert place.refusals.limit_counts == {Limit.HANDSHAKES: 3}


def test_a_reserve_of_descriptors_stays(make: Callable[..., Place]) -> None:
    place = make(max_descriptors=8)  # fewer than there are
    assert place.knock().recv(1) == b""
    dialled = place.dial()
    assert dialled.recv(ANSWER_BYTES) == encode_no_room(NoRoom.DESCRIPTORS) and dialled.recv(1) == b""
    assert place.refusals.limit_counts == {Limit.DESCRIPTORS: 2}


def test_who_comes_faster_than_the_rate_waits_outside(
    make: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "ACCEPT_RATE", Rate(20, 5))
    place = make(max_pending=1)
    begin = time.monotonic()
    guests = [place.knock() for _ in range(15)]
    assert [guest.recv(1) for guest in guests[:-1]] == [b""] * 14
    assert time.monotonic() - begin > 0.4


def test_what_is_no_greeting_is_counted_where_it_comes(make: Callable[..., Place]) -> None:
    place = make(login_throttle=LoginThrottle(3))
    place.knock().send(b"hello")
    place.dial().sendall(bytes(HELLO_BYTES))
    assert [guest.recv(1) for guest in place.guests] == [b"", b""]
    assert place.refusals.malformed_counts == {MessageSource.SOCKET: 1, MessageSource.HANDSHAKE: 1}
    assert not place.refusals.limit_counts
