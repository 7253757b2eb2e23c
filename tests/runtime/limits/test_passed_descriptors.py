"""Descriptors that nobody has asked for: they are refused, and whoever receives is not held up by closing them."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.waiting import settle

from collectived_runtime.limits import passed_descriptors
from collectived_runtime.limits.passed_descriptors import PeekingSocket, create_unix_socket

KINDS = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
LINGER_SECONDS = 300
MORE_THAN_THREADS = 40
UNKNOWN_OPTION = 9999


def lingering() -> tuple[socket.socket, socket.socket]:
    """A socket that blocks for the linger time whoever closes it last, and its peer, which does not read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_SECONDS))
    one.setblocking(False)
    try:
        while True:
            one.send(bytes(1 << 20))
    except BlockingIOError:
        one.setblocking(True)
        return one, peer


@pytest.fixture(params=["a kernel with SO_PASSRIGHTS", "an older kernel"])
def older(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "an older kernel":
        monkeypatch.setattr(passed_descriptors, "SO_PASSRIGHTS", UNKNOWN_OPTION)
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.getsockopt(socket.SOL_SOCKET, passed_descriptors.SO_PASSRIGHTS)
        except OSError:
            pytest.skip("this kernel is older than Linux 6.17")
    return False


class Pair:
    """A listener, who has connected there, and the same connection as it was accepted."""

    def __init__(self, path: Path, kind: socket.SocketKind) -> None:
        self.listener = create_unix_socket(kind)
        self.listener.bind(str(path))
        self.listener.listen()
        self.guest = socket.socket(socket.AF_UNIX, kind)
        self.guest.connect(str(path))
        self.accepted, _ = self.listener.accept()

    def close(self) -> None:
        for one in (self.listener, self.guest, self.accepted):
            one.close()


@pytest.fixture(params=KINDS, ids=["stream", "seqpacket"])
def pair(request: pytest.FixtureRequest, older: bool, tmp_path: Path) -> Iterator[Pair]:
    with closing(Pair(tmp_path / "s", request.param)) as made:
        assert isinstance(made.accepted, PeekingSocket) == older
        yield made


def pass_lingering(guest: socket.socket, older: bool) -> list[socket.socket]:
    """Sends a descriptor whose last reference is then the message's; what is to be closed after the test."""
    one, peer = lingering()
    if older:
        socket.send_fds(guest, [b"x"], [one.fileno()])
        one.close()  # does not block: the message has it too
        return [peer]
    with pytest.raises(OSError) as refused:
        socket.send_fds(guest, [b"x"], [one.fileno()])
    assert refused.value.errno == errno.EPERM
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return [one, peer]


def test_whoever_receives_and_closes_does_not_wait_for_what_was_passed(pair: Pair, older: bool) -> None:
    left = pass_lingering(pair.guest, older)

    def receive() -> None:
        pair.accepted.setblocking(False)
        with pytest.raises(OSError):  # nothing is there, or what nobody takes
            pair.accepted.recv(100)
        pair.accepted.close()

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    thread.join(LINGER_SECONDS / 10)
    ended_before_linger = not thread.is_alive()
    for one in left:  # which ends the linger
        one.close()
    assert ended_before_linger


def test_the_end_of_the_connection_is_seen_at_once(pair: Pair, older: bool) -> None:
    left = pass_lingering(pair.guest, older)
    pair.accepted.close()
    pair.guest.settimeout(20)
    with suppress(ConnectionResetError):  # it was closed with something unread
        assert pair.guest.recv(1) == b""
    for one in left:
        one.close()


def test_messages_without_descriptors_arrive_as_ever(pair: Pair) -> None:
    pair.guest.send(b"one")
    buffer = bytearray(10)
    assert pair.accepted.recv_into(buffer) == 3 and buffer[:3] == b"one"
    pair.guest.send(b"two")
    assert pair.accepted.recv(100) == b"two"
    pair.accepted.setblocking(False)
    with pytest.raises(BlockingIOError):
        pair.accepted.recv(100)
    pair.guest.close()
    assert pair.accepted.recv(100) == b""


def test_descriptors_still_go_to_whoever_has_connected(pair: Pair) -> None:
    socket.send_fds(pair.accepted, [b"here"], [0])
    said, descriptors, _, _ = socket.recv_fds(pair.guest, 100, 4)
    assert said == b"here" and len(descriptors) == 1
    os.close(descriptors[0])


def test_of_a_stream_nothing_is_taken_behind_what_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes before a descriptor arrives, and what brings it does not."""
    monkeypatch.setattr(passed_descriptors, "SO_PASSRIGHTS", UNKNOWN_OPTION)
    with closing(Pair(tmp_path / "s", socket.SOCK_STREAM)) as pair:
        pair.guest.send(b"before")
        assert pair.accepted.recv(100) == b"before"
        one, peer = lingering()
        socket.send_fds(pair.guest, [b"with"], [one.fileno()])
        one.close()
        with pytest.raises(OSError):
            pair.accepted.recv(100)
        peer.close()


def test_connections_that_nobody_has_accepted_do_not_hold_up_the_end_of_their_listener(
    older: bool, tmp_path: Path
) -> None:
    listener = create_unix_socket(socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    guest = socket.socket(socket.AF_UNIX)
    guest.connect(str(tmp_path / "s"))
    left = [guest, *pass_lingering(guest, older)]
    thread = threading.Thread(target=listener.close, daemon=True)
    thread.start()
    thread.join(LINGER_SECONDS / 10)
    assert not thread.is_alive()
    for one in left:
        one.close()
    settle(lambda: listener.fileno() < 0)


def list_descriptors() -> set[str]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the list's own, or another thread's
            found.add(os.readlink(path))
    return found


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def pass_nested(guest: socket.socket, older: bool) -> list[socket.socket]:
    """Sends a socket in which a message lies unread that has the lingering one."""
    outer, inner = socket.socketpair()
    left = pass_lingering(inner, older=True)
    inner.close()
    socket.send_fds(guest, [b"x"], [outer.fileno()])
    outer.close()
    return left


@pytest.mark.parametrize("send", [pass_lingering, pass_nested])
@pytest.mark.parametrize("kind", KINDS, ids=["stream", "seqpacket"])
def test_however_many_linger_all_are_closed_at_once(
    send: Callable[..., list[socket.socket]], kind: socket.SocketKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passed_descriptors, "SO_PASSRIGHTS", UNKNOWN_OPTION)
    left: list[socket.socket] = []
    accepted, threads = set(), count_threads()
    with closing(Pair(tmp_path / "s", kind)) as pair:
        for _ in range(MORE_THAN_THREADS):
            guest = socket.socket(socket.AF_UNIX, kind)
            guest.connect(str(tmp_path / "s"))
            connection, _ = pair.listener.accept()
            accepted.add(os.readlink(f"/proc/self/fd/{connection.fileno()}"))
            left += [guest, *send(guest, older=True)]
            connection.close()
        settle(lambda: not accepted & list_descriptors(), LINGER_SECONDS / 10)
        settle(lambda: count_threads() <= threads + 1, LINGER_SECONDS / 10)  # one waits for more
    for one in left:
        one.close()
