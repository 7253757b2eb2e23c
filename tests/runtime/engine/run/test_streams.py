"""Mail on its way out, over streams that have begun with what they have not taken."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import Signer
from tests.runtime.engine.conftest import Exchange, Switchboard

from collectived_proto.tls.files import client_context, load_material, server_context
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.run.links import LinkHandback
from collectived_runtime.engine.run.streams import OutgoingMessage, SendStream
from collectived_runtime.transport.handshake import do_tls_handshake
from collectived_runtime.transport.link import Link, Stream, TcpStream
from collectived_runtime.transport.tls_stream import RECORD_BYTES, TlsStream


@pytest.fixture(params=["tcp", "tls"])
def streams(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Stream, Stream]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    pair: tuple[Stream, Stream]
    if request.param == "tcp":
        pair = TcpStream(one), TcpStream(other)
    else:
        material = load_material(Signer(tmp_path).issue("host"))
        one.setblocking(False)
        other.setblocking(False)
        calling = client_context(material).wrap_socket(one, server_hostname="localhost", do_handshake_on_connect=False)
        called = server_context(material, demand=True).wrap_socket(
            other, server_side=True, do_handshake_on_connect=False
        )
        sides = {do_tls_handshake(calling), do_tls_handshake(called)}
        while sides:
            sides = {side for side in sides if next(side, None) is not None}
        pair = TlsStream(calling), TlsStream(called)
    yield pair
    for stream in pair:
        stream.close()


def test_what_was_begun_arrives_whole_when_its_sender_lets_go(streams: tuple[Stream, Stream]) -> None:
    """Parcels of one record each: of the one that finds no room, nothing has been taken, and yet it may have begun."""
    watch, gone = Poller(), list[str]()
    part = LinkHandback(Exchange(0, Switchboard()), 7, 100)
    way = SendStream(watch, lambda there, _: there(Link(1, 0, streams[0])), lambda error: gone.append(str(error)), part)
    left = deque[int]()
    for _ in range(2000):
        way.send(OutgoingMessage(0, deque([bytes([97]) * RECORD_BYTES]), lambda: left.append(0)))
    poll = select.poll()
    poll.register(streams[0].fileno(), select.POLLOUT)
    while poll.poll(100):  # until the kernel takes no more
        watch.wait(time.monotonic() + 0.1)
    whole = len(left)
    assert whole < 2000
    way.discard(0)
    way.send(OutgoingMessage(1, deque([bytes([98]) * RECORD_BYTES]), lambda: left.append(1)))
    got, view = bytearray(), memoryview(bytearray(4 * RECORD_BYTES))
    while 1 not in left or len(got) < len(left) * RECORD_BYTES:
        watch.wait(time.monotonic() + 0.01)
        got += view[: streams[1].recv_into(view)]
        assert not gone
    assert whole <= left.count(0) <= whole + 1, "what had not begun is not sent"
    assert got == b"a" * left.count(0) * RECORD_BYTES + b"b" * RECORD_BYTES
    way.close()
    watch.close()
