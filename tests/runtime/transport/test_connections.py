"""The connection server: who may come in, and how the others are shown out."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import select
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import settle

from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.version import OUR_VERSIONS, VersionRange
from collectived_runtime.transport import connections as reception_
from collectived_runtime.transport import handshake
from collectived_runtime.transport.connections import ConnectionServer
from collectived_runtime.transport.dial import DialRequest
from collectived_runtime.transport.hello import (
    ANSWER_BYTES,
    HELLO_BYTES,
    NONCE_BYTES,
    LinkHello,
    encode_version_mismatch,
    proof,
)
from collectived_runtime.transport.link import Link, LinkBroken, LinkRefused
from collectived_runtime.transport.listener import AcceptLimits

SECRET = "of these tests"


class Place:
    """Two connection servers, as of workers 0 and 1, and what arrives there."""

    def __init__(self, secret_of_1: str = SECRET, limits: AcceptLimits | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
        self.workers = [
            ConnectionServer(task, secret, str(self.folder / f"door-{task}"), ("127.0.0.1", 0), limits)
            for task, secret in enumerate((SECRET, secret_of_1))
        ]
        self.arrived: queue.Queue[Any] = queue.Queue()

    def call(self, acceptor: int = 1, port: int = 0, channel: int = 3) -> DialRequest:
        hello = LinkHello(0, acceptor, 7, 100, channel, os.urandom(NONCE_BYTES))
        return DialRequest(
            ("127.0.0.1", port or self.workers[1].link_port),
            hello,
            lambda link: self.arrived.put(("dialled", link)),
            lambda error: self.arrived.put(("failed", (error.peer, error))),
        )

    def enter(self, token: bytes, worker: int = 0, versions: VersionRange = OUR_VERSIONS) -> socket.socket:
        guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guest.settimeout(10)
        guest.connect(str(self.folder / f"door-{worker}"))
        guest.send(messages.encode_hello(token, versions))
        return guest

    def next(self) -> Any:
        return self.arrived.get(timeout=10)

    def close(self) -> None:
        try:
            for worker in self.workers:
                worker.close()
            while not self.arrived.empty():
                what = self.arrived.get()[1]
                if isinstance(what, (Link, socket.socket)):
                    what.close()
            assert os.listdir(self.folder) == []
        finally:
            shutil.rmtree(self.folder)


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


def test_nobody_else_may_come_before_a_worker_says_who_may() -> None:
    before = os.umask(0)
    try:
        made = Place()
    finally:
        os.umask(before)
    assert [one.stat().st_mode & 0o777 for one in sorted(made.folder.glob("door-*"))] == [0o600] * 2
    made.close()


def test_a_link_arrives_on_both_sides_and_carries_bytes(place: Place) -> None:
    place.workers[1].expect_links([(7, 100, 0, 3)], lambda link: place.arrived.put(("accepted", link)))
    place.workers[0].dial(place.call())
    links = dict(place.next() for _ in range(2))
    assert (links["dialled"].peer, links["accepted"].peer) == (1, 0)
    assert links["dialled"].send([b"x" * 100]) == 100
    received = bytearray(100)
    while not links["accepted"].recv_into(memoryview(received)):
        pass
    assert received == b"x" * 100
    for link in links.values():
        link.close()


def test_a_link_that_comes_before_it_is_expected_waits(place: Place) -> None:
    place.workers[0].dial(place.call())
    kind, mine = place.next()
    assert kind == "dialled"
    place.workers[1].expect_links([(7, 100, 0, 3)], lambda link: place.arrived.put(("accepted", link)))
    kind, theirs = place.next()
    assert kind == "accepted"
    mine.close()
    theirs.close()


def test_a_worker_with_another_secret_is_refused_on_both_sides() -> None:
    place = Place(secret_of_1="of others")
    try:
        place.workers[0].dial(place.call())
        kind, (peer, why) = place.next()
        assert (kind, peer) == ("failed", 1) and "secret" in str(why) and isinstance(why, LinkRefused)
    finally:
        place.close()


def test_nobody_is_let_in_by_an_empty_secret_which_everybody_knows() -> None:
    place = Place(secret_of_1="")
    try:
        said = LinkHello(0, 1, 7, 100, 3, bytes(NONCE_BYTES)).encode()
        with socket.create_connection(("127.0.0.1", place.workers[1].link_port), timeout=10) as guest:
            guest.sendall(said)
            assert guest.recv(ANSWER_BYTES, socket.MSG_WAITALL) == b"", "no digest of it is shown either"
        place.workers[0].dial(place.call())
        assert place.next()[0] == "failed"
        place.workers[1].set_secret(SECRET)
        place.workers[0].dial(place.call())
        kind, link = place.next()
        assert kind == "dialled"
        link.close()
    finally:
        place.close()


def test_who_dials_without_a_secret_proves_nothing_and_says_so(place: Place) -> None:
    place.workers[0].set_secret("")
    place.workers[0].dial(place.call())
    kind, (peer, why) = place.next()
    assert (kind, peer) == ("failed", 1)
    assert "this worker has no secret by which its peers are known: " in str(why) and isinstance(why, LinkRefused)


def test_a_replayed_proof_opens_nothing(place: Place) -> None:
    said = LinkHello(0, 1, 7, 100, 3, bytes(NONCE_BYTES)).encode()
    place.workers[1].expect_links([(7, 100, 0, 3)], lambda link: place.arrived.put(("accepted", link)))
    overheard = proof(SECRET, "dial", said, bytes(NONCE_BYTES))  # right for another nonce of the acceptor
    with socket.create_connection(("127.0.0.1", place.workers[1].link_port), timeout=10) as guest:
        guest.sendall(said)
        assert len(guest.recv(ANSWER_BYTES, socket.MSG_WAITALL)) == ANSWER_BYTES
        guest.sendall(overheard)
        assert guest.recv(1) == b""
    assert place.arrived.empty()


def test_a_link_for_another_worker_is_refused(place: Place) -> None:
    place.workers[0].dial(place.call(acceptor=5))
    kind, (peer, _) = place.next()
    assert (kind, peer) == ("failed", 5)


def test_garbage_is_shown_out_and_the_next_guest_is_served(place: Place) -> None:
    with socket.create_connection(("127.0.0.1", place.workers[1].link_port), timeout=10) as guest:
        guest.sendall(os.urandom(200))
        with contextlib.suppress(ConnectionResetError):  # it may close with our bytes unread
            assert guest.recv(1) == b""
    test_a_link_arrives_on_both_sides_and_carries_bytes(place)


def test_a_silent_guest_is_shown_out_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception_, "HANDSHAKE_SECONDS", 0.05)
    place = Place()
    try:
        with socket.create_connection(("127.0.0.1", place.workers[1].link_port), timeout=10) as guest:
            assert guest.recv(1) == b""
    finally:
        place.close()


def test_dialling_where_nobody_listens_fails_after_a_while_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        call = place.call(port=port)
        call.deadline = 0.0
        place.workers[0].dial(call)
        kind, (_, why) = place.next()
        assert kind == "failed" and str(port) in str(why) and not isinstance(why, LinkRefused)
    finally:
        place.close()


def test_a_token_admits_one_connection_once(place: Place) -> None:
    token = os.urandom(messages.TOKEN_BYTES)
    place.workers[0].admit(token, lambda connection: place.arrived.put(("client", connection)))
    with place.enter(token) as guest:
        kind, connection = place.next()
        assert kind == "client"
        connection.send(b"welcome")
        assert guest.recv(100) == b"welcome"
        connection.close()
    with place.enter(token) as guest:
        assert guest.recv(1) == b""


OLDEST = bytes.fromhex("43444c3101010101010101010101010101010101")  # a client's hello that says no versions
OLDEST_LINK = bytes.fromhex(  # worker 0 to worker 1, key 7, generation 100, channel 3
    "43444c010100010000000000010000000700000000000000640000000000000003000000" + 16 * "09"
)
LATER = VersionRange(7, 9, "9.9.9")


def test_a_client_of_the_first_protocol_comes_in(place: Place) -> None:
    place.workers[0].admit(OLDEST[4:], lambda connection: place.arrived.put(("client", connection)))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guest:
        guest.connect(str(place.folder / "door-0"))
        guest.send(OLDEST)
        kind, connection = place.next()
        assert kind == "client"
        connection.close()


def test_a_client_of_no_version_that_we_speak_is_told_so_and_shown_out(place: Place) -> None:
    token = os.urandom(messages.TOKEN_BYTES)
    place.workers[0].admit(token, lambda connection: place.arrived.put(("client", connection)))
    with place.enter(token, versions=LATER) as guest:
        code, text = messages.parse_refused(guest.recv(4096))
        assert code == Code.FAILED_PRECONDITION
        assert "the client (release unknown, protocol 7 to 9)" in text and "upgrade this worker" in text
        assert guest.recv(1) == b""
    assert place.arrived.empty()


def test_a_link_of_a_worker_of_the_first_protocol_arrives(place: Place) -> None:
    place.workers[1].expect_links([(7, 100, 0, 3)], lambda link: place.arrived.put(("accepted", link)))
    with socket.create_connection(("127.0.0.1", place.workers[1].link_port), timeout=10) as guest:
        guest.sendall(OLDEST_LINK)
        answer = guest.recv(ANSWER_BYTES, socket.MSG_WAITALL)
        guest.sendall(proof(SECRET, "dial", OLDEST_LINK, answer[:NONCE_BYTES]))
        kind, link = place.next()
        assert (kind, link.peer) == ("accepted", 0)
        link.close()


def test_a_link_of_no_version_that_we_speak_is_told_what_we_speak(place: Place) -> None:
    with socket.create_connection(("127.0.0.1", place.workers[1].link_port), timeout=10) as guest:
        guest.sendall(LinkHello(0, 1, 7, 100, 3, bytes(NONCE_BYTES)).encode(LATER))
        assert guest.recv(ANSWER_BYTES, socket.MSG_WAITALL) == encode_version_mismatch(OUR_VERSIONS)
        assert guest.recv(1) == b""


def test_who_dials_a_worker_of_other_versions_hears_which_of_the_two_is_to_be_upgraded(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place.workers[0].dial(place.call(port=listener.getsockname()[1]))
        connection, _ = listener.accept()
        with connection:
            connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
            connection.sendall(encode_version_mismatch(LATER))
            kind, (peer, why) = place.next()
    assert (kind, peer) == ("failed", 1)
    assert "worker 1 (release 9.9.9, protocol 7 to 9)" in str(why) and str(why).endswith("speaks protocol 7")


def test_an_unknown_token_is_shown_out(place: Place) -> None:
    with place.enter(os.urandom(messages.TOKEN_BYTES)) as guest:
        assert guest.recv(1) == b""


def test_a_token_that_is_too_old_admits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception_, "TOKEN_SECONDS", 0.0)
    place = Place()
    try:
        token = os.urandom(messages.TOKEN_BYTES)
        place.workers[0].admit(token, lambda connection: place.arrived.put(("client", connection)))
        with place.enter(token) as guest:
            assert guest.recv(1) == b""
    finally:
        place.close()


def test_a_door_that_is_in_use_is_an_error(place: Place) -> None:
    with pytest.raises(OSError):
        ConnectionServer(9, SECRET, str(place.folder / "door-0"), ("127.0.0.1", 0))


def test_a_link_of_a_generation_that_lives_waits_as_long_as_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that comes late to its first collective, because it loads data, is no fault."""
    monkeypatch.setattr(reception_, "HANDSHAKE_SECONDS", 0.05)
    place = Place()
    acceptor = place.workers[1]
    try:
        acceptor.expect_links([(7, 100, 0, 9)], lambda link: link.close())  # so the generation lives
        place.workers[0].dial(place.call())
        kind, mine = place.next()
        assert kind == "dialled"
        with pytest.raises(queue.Empty):
            place.arrived.get(timeout=0.2)  # four times as long as others may wait
        acceptor.expect_links([(7, 100, 0, 3)], lambda link: place.arrived.put(("accepted", link)))
        kind, theirs = place.next()
        assert kind == "accepted" and mine.send([b"x"]) == 1
        mine.close()
        theirs.close()
    finally:
        place.close()


def test_when_a_generation_ends_links_that_nobody_expected_are_closed(place: Place) -> None:
    place.workers[1].expect_links([(7, 100, 0, 9)], lambda link: link.close())
    place.workers[0].dial(place.call())
    _, mine = place.next()
    place.workers[1].discard_generation(7, 100)
    with pytest.raises(LinkBroken):
        while not mine.recv_into(memoryview(bytearray(1))):
            select.select([mine.stream], [], [], 10)
    mine.close()


def test_of_two_early_links_of_one_key_the_older_is_closed_and_the_later_serves(place: Place) -> None:
    place.workers[0].dial(place.call())
    _, older = place.next()
    place.workers[0].dial(place.call())
    _, later = place.next()
    with pytest.raises(LinkBroken):
        while not older.recv_into(memoryview(bytearray(1))):
            assert select.select([older.stream], [], [], 10)[0], "it was left open"
    place.workers[1].expect_links([(7, 100, 0, 3)], lambda link: place.arrived.put(("accepted", link)))
    kind, theirs = place.next()
    assert kind == "accepted" and theirs.send([b"x"]) == 1
    assert select.select([later.stream], [], [], 10)[0] and later.recv_into(memoryview(bytearray(1))) == 1
    for link in (older, later, theirs):
        link.close()


@pytest.mark.parametrize("address", [("a..b", 1), ("127.0.0.1", 70_000), ("127.0.0.1", 0), ("no-such-host.invalid", 9)])
def test_an_address_that_is_none_is_a_reason_and_the_next_call_gets_through(
    place: Place, address: tuple[str, int]
) -> None:
    call = place.call()
    call.address = address
    place.workers[0].dial(call)
    what, (peer, why) = place.arrived.get(timeout=30)
    assert (what, peer) == ("failed", 1) and f"{address[0]}:{address[1]}" in str(why)
    place.workers[1].expect_links([(7, 100, 0, 3)], lambda link: place.arrived.put(("accepted", link)))
    place.workers[0].dial(place.call())
    both = dict((place.next(), place.next()))
    assert sorted(both) == ["accepted", "dialled"]
    for link in both.values():
        link.close()


def test_a_host_that_is_named_is_dialled(place: Place) -> None:
    call = place.call()
    call.address = ("localhost", call.address[1])
    place.workers[1].expect_links([(7, 100, 0, 3)], lambda link: place.arrived.put(("accepted", link)))
    place.workers[0].dial(call)
    both = dict((place.next(), place.next()))
    assert sorted(both) == ["accepted", "dialled"]
    for link in both.values():
        link.close()


def arrives(place: Place, key: tuple[int, int, int, int] = (7, 100, 0, 3)) -> bool:
    """Whether a link comes about in both connection servers."""
    place.workers[1].expect_links([key], lambda link: place.arrived.put(("accepted", link)))
    place.workers[0].dial(place.call(channel=key[3]))
    both = dict((place.next(), place.next()))
    for link in both.values():
        link.close()
    return sorted(both) == ["accepted", "dialled"]


@pytest.mark.parametrize("host", ["::1", "127.0.0.1", "localhost"])
def test_links_come_by_either_version_of_ip(tmp_path: Path, host: str) -> None:
    worker = ConnectionServer(1, SECRET, str(tmp_path / "door"), (host, 0))
    arrived: queue.Queue[Any] = queue.Queue()
    try:
        hello = LinkHello(0, 1, 7, 100, 3, os.urandom(NONCE_BYTES))
        worker.expect_links([(7, 100, 0, 3)], arrived.put)
        worker.dial(DialRequest((host, worker.link_port), hello, arrived.put, arrived.put))
        links = [arrived.get(timeout=10) for _ in range(2)]
        assert all(isinstance(link, Link) for link in links), links
        for link in links:
            link.close()
    finally:
        worker.close()


def test_who_hangs_up_within_the_handshake_is_dialled_again(place: Place) -> None:
    """As a worker does that has no room just now, which says nothing of who dials nor of what it knows."""
    with socket.create_server(("127.0.0.1", 0)) as overfull:

        def hang_up() -> None:
            for _ in range(2):
                overfull.accept()[0].close()
            guest = overfull.accept()[0]
            said = guest.recv(HELLO_BYTES, socket.MSG_WAITALL)
            nonce = os.urandom(NONCE_BYTES)
            guest.sendall(nonce + proof(SECRET, "accept", said, nonce))
            place.arrived.put(("accepted", guest))

        thread = threading.Thread(target=hang_up)
        thread.start()
        place.workers[0].dial(place.call(port=overfull.getsockname()[1]))
        came = dict(place.next() for _ in range(2))
        thread.join()
    assert set(came) == {"accepted", "dialled"}
    for one in came.values():
        one.close()


def refusal(place: Place) -> str:
    """Why a link that is dialled once is refused."""
    call = place.call()
    call.deadline = 0.0
    place.workers[0].dial(call)
    kind, (peer, why) = place.next()
    assert (kind, peer) == ("failed", 1) and isinstance(why, LinkRefused)
    return str(why)


def test_who_has_no_descriptors_for_a_link_says_so() -> None:
    place = Place(limits=AcceptLimits(max_descriptors=1))
    try:
        assert "it has hardly any file descriptors left (RLIMIT_NOFILE of that worker)" in refusal(place)
    finally:
        place.close()


def test_who_has_too_many_links_that_nobody_expects_says_so_and_takes_those_that_are_expected(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reception_, "MAX_EARLY_LINKS", 0)
    assert "4096 unexpected links wait there already" in refusal(place)
    assert re.search(
        r"the link from 127.0.0.1:\d+ \(which calls itself worker 0\) was refused: 0 unexpected", caplog.text
    )
    assert arrives(place)


def test_the_log_names_who_was_refused(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", place.workers[1].link_port), timeout=10) as guest:
        guest.sendall(bytes(HELLO_BYTES))
        assert not guest.recv(1)
        port = guest.getsockname()[1]
    assert f"the connection from 127.0.0.1:{port} was refused: the first bytes are not those of" in caplog.text
    with place.enter(b"nothing") as client:
        assert not client.recv(1)
    who = f"the connection from a client (pid {os.getpid()}, uid {os.getuid()}) was refused: a client showed a token"
    settle(lambda: who in caplog.text)


def test_a_caller_that_fails_when_its_link_is_there_costs_nobody_else_theirs(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    def unlucky(link: Link) -> None:
        link.close()
        raise RuntimeError("planted")

    place.workers[0].dial(place.call())
    kind, mine = place.next()
    while not place.workers[1]._early_links:  # so that it is handed over where it is asked for
        select.select([], [], [], 0.001)
    place.workers[1].expect_links([(7, 100, 0, 3)], unlucky)
    assert kind == "dialled" and arrives(place, (7, 100, 0, 4))
    assert "the connection server goes on without what has failed" in caplog.text and "planted" in caplog.text
    mine.close()


@pytest.mark.parametrize("error", [OverflowError("planted"), OSError(errno.ENOSPC, "planted")])
def test_a_call_that_cannot_even_begin_fails_and_the_next_gets_through(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """As where the system lets no more descriptors be waited for."""

    def start(*_: object) -> None:
        raise error

    call = place.call()
    call.deadline = 0.0
    with monkeypatch.context() as full:
        full.setattr(place.workers[0]._handshakes, "start", start)
        place.workers[0].dial(call)
        kind, (peer, why) = place.next()
    assert (kind, peer) == ("failed", 1) and "planted" in str(why)
    assert arrives(place)


def test_a_call_that_fails_as_nobody_thought_of_is_told_to_whoever_asked(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def introduce(*_: object) -> Any:
        raise OverflowError("planted")

    with monkeypatch.context() as broken:
        broken.setattr(handshake, "exchange_hello", introduce)
        place.workers[0].dial(place.call())
        kind, (peer, why) = place.next()
    assert (kind, peer) == ("failed", 1) and "planted" in str(why)
    assert arrives(place)


def test_who_fails_while_being_shown_out_is_shown_out_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    def failed(error: LinkBroken) -> None:
        place.arrived.put(("failed", (error.peer, error)))
        raise RuntimeError("planted")

    with socket.create_server(("127.0.0.1", 0)) as listener:  # which never answers
        call = place.call(port=listener.getsockname()[1])
        call.deadline, call.on_failure = 0.0, failed
        place.workers[0].dial(call)
        assert place.next()[0] == "failed"
    assert arrives(place)
    assert place.arrived.empty() and caplog.text.count("the connection server goes on without what has failed") == 1


def test_where_there_is_no_thread_to_look_a_name_up_the_call_fails_and_the_next_gets_through(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    call = place.call()
    call.address = ("localhost", call.address[1])
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none)
        place.workers[0].dial(call)
        kind, (peer, why) = place.next()
    assert (kind, peer) == ("failed", 1) and "can't start new thread" in str(why)
    test_a_host_that_is_named_is_dialled(place)
