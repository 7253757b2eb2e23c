"""The proxy of the drills: what it lets through is what was sent, and a fault comes where it was meant."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest
from tests.drills.limits import Limit
from tests.drills.proxy import GARBAGE, Act, Door, Fault, Framing, Place

from collectived_runtime.transport.frame import HEADER_BYTES, FrameTemplate, encode_bye
from collectived_runtime.transport.hello import HELLO_BYTES, PROOF_BYTES

HANDSHAKE = HELLO_BYTES + PROOF_BYTES
STAMP = FrameTemplate(1, 2, 3, 0, 0, bytes(8), bytes(8))


def frame(length: int) -> bytes:
    return STAMP.header(0, 0, length) + bytes([length % 251]) * length


STREAM = bytes(HANDSHAKE) + frame(100) + frame(0) + frame(7)


@pytest.mark.parametrize("seed", range(20))
def test_framing_finds_the_same_places_however_bytes_come(seed: int) -> None:
    chance = random.Random(seed)
    framing, at, places = Framing(HANDSHAKE), 0, []
    rest = STREAM
    while rest:
        size = chance.randrange(1, 80)
        for place, piece in framing.split(rest[:size]):
            assert STREAM[at : at + len(piece)] == piece
            if place is not Place.ANYWHERE:
                places.append((at, place))
            at += len(piece)
        rest = rest[size:]
    first, half = HANDSHAKE, HEADER_BYTES // 2
    second = first + HEADER_BYTES + 100
    third = second + HEADER_BYTES
    assert places == [
        (first, Place.BETWEEN),
        (first + half, Place.HEADER),
        (first + HEADER_BYTES + 50, Place.PAYLOAD),
        (second, Place.BETWEEN),
        (second + half, Place.HEADER),
        (third, Place.BETWEEN),
        (third + half, Place.HEADER),
        (third + HEADER_BYTES + 3, Place.PAYLOAD),
    ]


@pytest.fixture
def ends() -> Iterator[tuple[Door, socket.socket, socket.socket]]:
    """A door, the end that came to it, and the end to which it leads."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        door = Door("", server.getsockname, framed=True)
        host, _, port = door.address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), 5) as near:
                far, _ = server.accept()
                far.settimeout(5)
                with far:
                    yield door, near, far
        finally:
            door.close()


def received(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := sock.recv(count - len(data))):
        data += piece
    return data


def arm(door: Door, act: Act, place: Place) -> None:
    Limit(5).until(lambda: bool(door.flows), "the connection")
    door.flows[0].arm(Fault(act, place))


def test_what_is_sent_arrives(ends: tuple[Door, socket.socket, socket.socket]) -> None:
    _, near, far = ends
    near.sendall(STREAM)
    near.shutdown(socket.SHUT_WR)
    assert received(far, len(STREAM) + 1) == STREAM
    far.sendall(b"answer")
    assert received(near, 6) == b"answer"


def test_half_a_payload_arrives_and_then_the_end(ends: tuple[Door, socket.socket, socket.socket]) -> None:
    door, near, far = ends
    arm(door, Act.CLOSE, Place.PAYLOAD)
    near.sendall(STREAM)
    wanted = STREAM[: HANDSHAKE + HEADER_BYTES + 50]
    assert received(far, len(STREAM)) == wanted


def test_half_a_header_arrives_and_then_a_reset(ends: tuple[Door, socket.socket, socket.socket]) -> None:
    door, near, far = ends
    arm(door, Act.RESET, Place.HEADER)
    near.sendall(STREAM)
    with pytest.raises(ConnectionResetError):
        received(far, len(STREAM))


def test_garbage_comes_between_two_frames_once(ends: tuple[Door, socket.socket, socket.socket]) -> None:
    door, near, far = ends
    arm(door, Act.GARBAGE, Place.BETWEEN)
    near.sendall(STREAM)
    wanted = STREAM[:HANDSHAKE] + GARBAGE + STREAM[HANDSHAKE:]
    assert received(far, len(wanted)) == wanted


def test_what_is_held_arrives_when_it_is_released(ends: tuple[Door, socket.socket, socket.socket]) -> None:
    door, near, far = ends
    arm(door, Act.HOLD, Place.PAYLOAD)
    near.sendall(STREAM)
    before = HANDSHAKE + HEADER_BYTES + 50
    assert received(far, before) == STREAM[:before]
    Limit(5).until(door.flows[0].faulted.is_set, "the fault")
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(1)
    door.flows[0].release()
    far.settimeout(5)
    assert received(far, len(STREAM) - before) == STREAM[before:]


def test_a_door_that_is_shut_lets_nobody_through(ends: tuple[Door, socket.socket, socket.socket]) -> None:
    door, near, _ = ends
    Limit(5).until(lambda: bool(door.connections), "the connection")
    door.shut()
    near.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        assert near.recv(1) == b""
    host, _, port = door.address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as late:
        assert late.recv(1) == b""
    assert door.refused == 1


def test_after_a_farewell_that_keeps_the_connection_another_handshake_follows() -> None:
    framing = Framing(HANDSHAKE)
    stream = STREAM + encode_bye(1, 2, keeps=True) + bytes(HANDSHAKE) + frame(5) + encode_bye(1, 2) + frame(0)
    places = [place for place, _ in framing.split(stream)]
    assert framing.handshakes == 2
    assert places.count(Place.BETWEEN) == 7 and places.count(Place.PAYLOAD) == 3
    assert places[-1] is Place.HEADER
