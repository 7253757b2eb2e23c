"""Links that another process reads and writes for a while, and how much is on its way to a worker of the same host."""

from __future__ import annotations

import select
import socket

import pytest
from tests.runtime.transport.test_link_streams import tcp_pair

from collectived_runtime.transport.link import LOCAL_SEND_BYTES, Link, LinkBroken, TcpStream


def get_send_bytes(connected: socket.socket) -> int:
    return connected.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def test_little_is_on_its_way_to_the_same_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    before = get_send_bytes(dialled)
    streams = TcpStream(dialled), TcpStream(accepted)
    for connected in (dialled, accepted):
        assert get_send_bytes(connected) == 2 * LOCAL_SEND_BYTES != before  # the kernel's bookkeeping counts
    for stream in streams:
        stream.close()


def test_the_system_chooses_for_another_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0))
        accepted, _ = server.accept()
    before = get_send_bytes(dialled)
    stream = TcpStream(dialled)
    assert get_send_bytes(dialled) == before
    stream.close()
    accepted.close()


def test_a_connection_that_has_ended_becomes_a_stream_all_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    dialled.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    dialled.close()
    assert select.select([accepted], [], [], 10)[0]
    with pytest.raises(ConnectionResetError):
        accepted.recv(1)
    stream = TcpStream(accepted)
    with pytest.raises(LinkBroken):
        stream.recv_into(memoryview(bytearray(1)))
    stream.close()


def test_closing_a_link_that_was_lent_ends_the_connection_for_all() -> None:
    one, other = tcp_pair()
    link = Link(1, 0, one)
    for is_whole in (True, False):
        link.lend()
        assert link.is_lent and link.is_mid_send
        link.take_back(is_whole=is_whole)
        assert (link.is_lent, link.is_mid_send) == (False, not is_whole)
    with socket.socket(fileno=socket.dup(one.fileno())):  # of the other process
        link.close()
        assert select.select([other], [], [], 10)[0]
        with pytest.raises(LinkBroken, match="closed"):
            other.recv_into(memoryview(bytearray(1)))
    other.close()
