"""Sockets of the worker's door: what comes with a message, and what the kernel drops on the way."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from collectived.shared import seqpacket

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        yield near, far


def test_a_descriptor_that_this_process_has_no_room_for_is_said_to_be_lost(pair: Pair) -> None:
    near, far = pair
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    socket.send_fds(far, [b"first"], [far.fileno()])
    socket.send_fds(far, [b"second"], [far.fileno()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert seqpacket.receive(near, bytearray(100)) == (b"first", seqpacket.DESCRIPTOR_LOST)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    message, descriptor = seqpacket.receive(near, bytearray(100))
    assert message == b"second" and descriptor >= 0
    os.close(descriptor)


def test_a_message_without_a_descriptor_has_lost_none(pair: Pair) -> None:
    near, far = pair
    far.send(b"alone")
    assert seqpacket.receive(near, bytearray(100)) == (b"alone", -1)
    far.close()
    assert seqpacket.receive(near, bytearray(100)) == (b"", -1)
