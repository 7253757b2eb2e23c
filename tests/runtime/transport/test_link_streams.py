"""One conformance suite that every stream below a link passes: TCP, TLS, and the in-memory network of other tests."""

from __future__ import annotations

import contextlib
import itertools
import random
import select
import socket
from collections.abc import Iterator, Sequence

import pytest
from tests.certificates import Signer
from tests.fakes.loopback import LoopbackNetwork

from collectived_proto.tls.files import TlsMaterial, client_context, load_material, server_context
from collectived_runtime.transport.frame import HEADER_BYTES, Frame, FrameKind, parse
from collectived_runtime.transport.handshake import do_tls_handshake
from collectived_runtime.transport.link import READ_AHEAD_BYTES, BytesLike, Link, LinkBroken, Stream, TcpStream
from collectived_runtime.transport.tls_stream import TlsStream

Pair = tuple[Stream, Stream]
LARGEST_RECORD = 16 << 10


def sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        end.setblocking(False)
    return one, other


def tcp_pair() -> Pair:
    one, other = sockets()
    return TcpStream(one), TcpStream(other)


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> TlsMaterial:
    return load_material(Signer(tmp_path_factory.mktemp("certificates")).issue("host"))


def tls_pair(material: TlsMaterial) -> Pair:
    one, other = sockets()
    dials, accepts = client_context(material), server_context(material, demand=True)
    calling = dials.wrap_socket(one, server_hostname="localhost", do_handshake_on_connect=False)
    called = accepts.wrap_socket(other, server_side=True, do_handshake_on_connect=False)
    sides = {do_tls_handshake(calling), do_tls_handshake(called)}
    while sides:
        sides = {side for side in sides if next(side, None) is not None}
    return TlsStream(calling), TlsStream(called)


@pytest.fixture(params=["tcp", "tls", "loopback"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    match request.param:
        case "tcp":
            streams = tcp_pair()
        case "tls":
            streams = tls_pair(request.getfixturevalue("material"))
        case _:
            streams = LoopbackNetwork().streams()
    yield streams
    for stream in streams:
        stream.close()


def until_readable(stream: Stream) -> None:
    if stream.fileno() >= 0:
        assert select.select([stream], [], [], 10)[0]


def receive(stream: Stream, count: int) -> bytes:
    data = bytearray(count)
    got = 0
    while got < count:
        until_readable(stream)
        got += stream.recv_into(memoryview(data)[got:])
    return bytes(data)


def test_parts_arrive_as_one_sequence(pair: Pair) -> None:
    assert pair[0].send([b"head", memoryview(b"payload")]) == 11
    assert receive(pair[1], 11) == b"headpayload"


def test_nothing_there_is_zero_and_does_not_block(pair: Pair) -> None:
    assert pair[0].recv_into(memoryview(bytearray(8))) == 0


def test_a_full_stream_takes_nothing_until_it_is_read(pair: Pair) -> None:
    block = bytes(1 << 20)
    sent = 0
    while taken := pair[0].send([block]):
        sent += taken
    assert pair[0].send([block]) == 0
    receive(pair[1], sent)
    until_writable(pair[0])
    assert pair[0].send([block]) > 0


def test_what_was_not_taken_is_given_again_and_arrives_once(pair: Pair) -> None:
    data = random.Random(5).randbytes(24 << 20)
    parts: list[BytesLike] = [data[at : at + size] for at, size in pieces(len(data))]
    got = bytearray(len(data))
    at = 0
    left = list(parts)
    while at < len(data):
        taken = pair[0].send(left[:32]) if left else 0
        while left and taken >= len(left[0]):
            taken -= len(left.pop(0))
        if taken:
            left[0] = memoryview(left[0])[taken:]
        at += pair[1].recv_into(memoryview(got)[at : at + 100_000])
    assert not left and got == data


def pieces(length: int) -> Iterator[tuple[int, int]]:
    """As headers and payloads follow each other."""
    at, sizes = 0, itertools.cycle([64, 1 << 20, 64, 1, 64, 3 * LARGEST_RECORD, 64, 100_003, 64, LARGEST_RECORD - 64])
    while at < length:
        size = min(next(sizes), length - at)
        yield at, size
        at += size


def test_a_read_of_a_grain_leaves_nothing_that_poll_does_not_tell_of(pair: Pair) -> None:
    if pair[1].fileno() < 0:
        return  # nobody polls it
    sizes = [1, 64, 4096, LARGEST_RECORD, LARGEST_RECORD + 1, 5 * LARGEST_RECORD + 7]
    for size in sizes:
        assert pair[0].send([bytes(size)]) == size
    view, got = memoryview(bytearray(pair[1].min_read_bytes + READ_AHEAD_BYTES)), 0
    while got < sum(sizes):
        assert select.select([pair[1]], [], [], 10)[0], f"{sum(sizes) - got} bytes are there, and poll does not tell"
        got += pair[1].recv_into(view)
    assert not select.select([pair[1]], [], [], 0)[0]


def test_both_directions_are_apart(pair: Pair) -> None:
    pair[0].send([b"there"])
    pair[1].send([b"back"])
    assert receive(pair[0], 4) == b"back"
    assert receive(pair[1], 5) == b"there"


def test_what_was_sent_before_the_end_still_arrives_and_then_the_end_is_an_error(pair: Pair) -> None:
    pair[0].send([b"last"])
    pair[0].close()
    assert receive(pair[1], 4) == b"last"
    until_readable(pair[1])
    with pytest.raises(LinkBroken):
        pair[1].recv_into(memoryview(bytearray(1)))


def test_sending_to_a_peer_that_is_gone_is_an_error_before_long(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(LinkBroken):
        for _ in range(1000):
            pair[0].send([bytes(1 << 16)])
            with contextlib.suppress(BlockingIOError):
                until_writable(pair[0])


def until_writable(stream: Stream) -> None:
    if stream.fileno() >= 0:
        select.select([], [stream], [], 10)


def test_a_header_is_whole_or_not_there() -> None:
    one, other = LoopbackNetwork().streams()
    link = Link(1, 0, other)
    frame = Frame(FrameKind.DATA, 1, 2, 3, 2**62, 5, 2**40, b"planhash", b"thechain", 2**40, 8)
    data = frame.encode()
    assert len(data) == HEADER_BYTES == 64
    one.send([data[:10]])
    assert link.read_header() is None and not link.has_header
    one.send([data[10:]])
    header = link.read_header()
    assert header is not None and parse(header) == frame
    assert link.has_header
    link.consume_header()
    assert link.read_header() is None and not link.has_header


def test_a_broken_link_names_its_peer() -> None:
    one, other = LoopbackNetwork().streams()
    link = Link(7, 0, other)
    one.close()
    with pytest.raises(LinkBroken) as caught:
        link.read_header()
    assert caught.value.peer == 7


class Counting:
    """A stream that counts how often it is read."""

    def __init__(self, stream: Stream) -> None:
        self.min_read_bytes = stream.min_read_bytes
        self._stream = stream
        self.reads = 0

    def fileno(self) -> int:
        return self._stream.fileno()

    def send(self, parts: Sequence[BytesLike]) -> int:
        return self._stream.send(parts)

    def recv_into(self, view: memoryview) -> int:
        self.reads += 1
        return self._stream.recv_into(view)

    def close(self) -> None:
        self._stream.close()


def test_small_frames_are_read_at_once_and_taken_one_after_another(pair: Pair) -> None:
    counting = Counting(pair[1])
    link = Link(0, 0, counting)
    headers = [Frame(FrameKind.DATA, 0, 0, n, 1, 2, 3, bytes(8), bytes(8), 0, 5).encode() for n in range(3)]
    pair[0].send([part for n, header in enumerate(headers) for part in (header, b"body%d" % n)])
    for n, header in enumerate(headers):
        until_readable(pair[1]) if not n else None
        assert link.read_header() == header and link.has_header
        link.consume_header()
        body = bytearray(8)
        assert link.recv_into(memoryview(body)[:5]) == 5 and body[:5] == b"body%d" % n
    assert counting.reads == 1
    assert link.read_header() is None and not link.has_header
    assert link.bytes_received == 3 * (HEADER_BYTES + 5)


def test_a_frame_longer_than_what_is_read_ahead_arrives_whole(pair: Pair) -> None:
    link = Link(0, 0, pair[1])
    sent = bytes(range(256)) * 100
    header = Frame(FrameKind.DATA, 0, 0, 0, 1, 2, 3, bytes(8), bytes(8), 0, len(sent)).encode()
    pair[0].send([header, sent])
    until_readable(pair[1])
    assert link.read_header() == header
    link.consume_header()
    got = bytearray(len(sent))
    at = 0
    while at < len(sent):
        at += link.recv_into(memoryview(got)[at:])
    assert got == sent


def test_a_link_goes_on_where_others_have_read_and_written_for_it(pair: Pair) -> None:
    """They have sent the beginning of a frame, and have read one and a part of the next."""
    near, far = (Link(peer, 0, stream) for peer, stream in enumerate(pair))
    header = Frame(FrameKind.DATA, 0, 0, 0, 1, 2, 3, bytes(8), bytes(8), 0, 3).encode()
    frames = [header, b"abc"]
    assert near.stream.send([header[:20]]) == 20
    assert near.take_unread() == b""
    near.resume(b"", 20)
    assert near.is_mid_send
    sent = 0
    while sent < HEADER_BYTES + 3:
        left = b"".join(frames)[sent:]
        sent += near.send([left[:10], left[10:]])
    assert near.bytes_sent == HEADER_BYTES + 3
    until_readable(far.stream)
    large = bytes(range(256)) * 300
    while (got := far.read_header()) is None:
        until_readable(far.stream)
    assert got == header
    unread = far.take_unread()
    assert not far.has_header
    far.resume(unread + large, 0)
    assert far.read_header() == header
    far.consume_header()
    body, view = b"", memoryview(bytearray(1 << 15))
    while len(body) < 3 + len(large):
        count = far.recv_into(view)
        body += bytes(view[:count])
    assert body.endswith(large) and body.startswith(b"abc"[: len(unread) - HEADER_BYTES])
