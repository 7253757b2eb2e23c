"""As the shared memory of Triton taught (CVE-2025-23319 and its like): what a session may name is its own, cannot be
guessed, and ends with it; what it may not name is not told from what is not there."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tests.e2e.raw_client import SUM, Raw, data, described, failure
from tests.e2e.security.conftest import SECRET, Place
from tests.waiting import settle

from collectived_proto.codec import versions_to_proto
from collectived_proto.ipc import messages
from collectived_proto.v1 import worker_pb2
from collectived_proto.version import OUR_VERSIONS

pytestmark = pytest.mark.timeout(120)
RANGE = versions_to_proto(OUR_VERSIONS)
TELLTALE = ("/tmp", "victim", SECRET, ".sock")


@pytest.fixture(scope="module")
def address(lasting: Place) -> str:
    return str(lasting.worker()["address"])


@pytest.fixture
def two(address: str) -> Iterator[tuple[Raw, Raw]]:
    """A victim that is alone in its group, and somebody else."""
    victim, other = Raw(address), Raw(address)
    victim.join("victim", 1, 0)
    other.join("other", 1, 0)
    yield victim, other
    for one in (victim, other):
        one.close()


class Local:
    """A session with its socket, of a client that knows the wire alone."""

    def __init__(self, address: str) -> None:
        self.raw = Raw(address)
        request = worker_pb2.OpenSessionRequest(protocol=RANGE, local=True, pid=os.getpid(), job="raw")
        self.life = self.raw.stub.OpenSession(request)
        self.opened = next(self.life).opened
        self.socket = self.enter(self.opened.door, self.opened.token)
        assert messages.parse_type(self.socket.recv(messages.MAX_MESSAGE)) is messages.MessageType.PONG

    def enter(self, door: str, token: bytes) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(20)
        sock.connect(door)
        sock.send(messages.encode_hello(token))
        return sock

    def join(self, name: str, size: int = 1, rank: int = 0) -> None:
        request = worker_pb2.JoinRequest(
            session=self.opened.session, name=name, min_size=size, max_size=size, rank=rank
        )
        *_, last = self.raw.stub.Join(request, timeout=20)
        self.joined, self.rank = last.joined, rank
        self.doorbell = self.enter(last.joined.door, last.joined.token)

    def prepare(self, *shapes: tuple[int, ...]) -> int:
        request = worker_pb2.PrepareRequest(
            session=self.opened.session, key=self.joined.group.key, rank=self.rank, collective=described(SUM, *shapes)
        )
        return int(self.raw.stub.Prepare(request, timeout=20).id)

    def arena(self, size: int) -> int:
        self.socket.send(messages.encode_arena(messages.MessageType.ARENA_REQUEST, 0, size))
        message, descriptors, _, _ = socket.recv_fds(self.socket, messages.MAX_MESSAGE, 1)
        for descriptor in descriptors:
            os.close(descriptor)
        assert messages.parse_type(message) is messages.MessageType.ARENA
        return messages.parse_arena(message)[0]

    def ring(self, prepared: int, *addresses: tuple[int, int], instance: int = 0) -> None:
        generation = self.joined.group.generation
        self.doorbell.send(messages.Submit(generation, prepared, instance, 0.0, False, addresses).encode())

    def heard(self) -> messages.MessageType | None:
        """The kind of the first that is no arena; None: the worker has hung up."""
        message = self._heard()
        return messages.parse_type(message) if message else None

    def done(self) -> bytes:
        """The next completion."""
        message = self._heard()
        assert messages.parse_type(message) is messages.MessageType.DONE
        return message

    def _heard(self) -> bytes:
        while True:
            try:
                message = self.doorbell.recv(messages.MAX_MESSAGE)
            except ConnectionResetError:
                return b""
            if not message or messages.parse_type(message) is not messages.MessageType.ARENA:
                return message

    def close(self) -> None:
        for one in (self.socket, getattr(self, "doorbell", None)):
            if one is not None:
                one.close()
        self.life.cancel()
        self.raw.close()


@pytest.fixture
def local(address: str) -> Iterator[Callable[[str], Local]]:
    """Makes local sessions that have joined a group of their own, or of no name none."""
    made: list[Local] = []

    def one(name: str) -> Local:
        made.append(Local(address))
        if name:
            made[-1].join(name)
        return made[-1]

    yield one
    for session in made:
        session.close()


def test_names_of_sessions_and_tokens_have_128_random_bits_and_are_never_the_same(address: str) -> None:
    sessions = [Local(address) for _ in range(8)]
    try:
        names = [one.opened.session for one in sessions] + [one.opened.token for one in sessions]
    finally:
        for one in sessions:
            one.close()
    assert len(set(names)) == len(names) and {len(name) for name in names} == {16}
    ones = sum(bin(byte).count("1") for name in names for byte in name)
    assert 0.4 < ones / (len(names) * 128) < 0.6
    assert all(len({name[at] for name in names}) > 4 for at in range(16))  # no part of it is a counter


@pytest.mark.parametrize("method", ["Prepare", "Submit", "Abort", "Leave"])
def test_a_rank_of_another_session_is_not_found(two: tuple[Raw, Raw], method: str) -> None:
    victim, other = two
    mine = other.opened.session
    asked: dict[str, Callable[[int], Any]] = {
        "Prepare": lambda key: other.stub.Prepare(
            worker_pb2.PrepareRequest(session=mine, key=key, rank=0, collective=described(SUM, (1,))), timeout=10
        ),
        "Submit": lambda key: list(other.call(other.header(described(SUM, (1,)), key=key), data([1.0]))),
        "Abort": lambda key: other.stub.Abort(worker_pb2.AbortRequest(session=mine, key=key), timeout=10),
        "Leave": lambda key: other.stub.Leave(worker_pb2.LeaveRequest(session=mine, key=key), timeout=10),
    }
    code, said, _ = failure(lambda: asked[method](victim.key))
    never, said_of_none, _ = failure(lambda: asked[method](victim.key + 12345))
    assert code == never == "NOT_FOUND"
    # A key that somebody else has is not told from one that nobody has.
    assert said.replace(str(victim.key), "K") == said_of_none.replace(str(victim.key + 12345), "K")
    assert not any(word in said for word in TELLTALE)
    assert victim.submit(described(SUM, (1,)), data([21.0])).value == [21.0]


@pytest.mark.parametrize("session", [b"", b"x", bytes(16), b"\xff" * 16, b"0" * 4096])
def test_a_session_that_nobody_has_is_not_known(two: tuple[Raw, Raw], session: bytes) -> None:
    victim, other = two
    header = other.header(described(SUM, (1,)), session=session, key=victim.key)
    for call in (
        lambda: list(other.call(header, data([1.0]))),
        lambda: other.stub.Abort(worker_pb2.AbortRequest(session=session, key=victim.key), timeout=10),
        lambda: list(
            other.stub.Join(worker_pb2.JoinRequest(session=session, name="n", min_size=1, max_size=1), timeout=10)
        ),
    ):
        code, said, _ = failure(call)
        assert code == "UNAVAILABLE" and "does not know the session" in said
        assert not any(word in said for word in TELLTALE)


def test_a_session_that_has_ended_cannot_be_used_again(address: str) -> None:
    former, other = Raw(address), Raw(address)
    former.join("former", 1, 0)
    name, key = former.opened.session, former.key
    former.close()
    try:

        def gone() -> bool:
            header = other.header(described(SUM, (1,)), session=name, key=key)
            return "this session has ended" in failure(lambda: list(other.call(header, data([1.0]))))[1]

        settle(lambda: not other.status().lanes)
        assert gone()
    finally:
        other.close()


def test_a_collective_that_another_session_has_prepared_is_not_known(local: Callable[[str], Local]) -> None:
    victim, other = local("victim"), local("other")
    theirs, mine = victim.prepare((4,)), other.prepare((4,))
    assert theirs.bit_length() > 32 and mine.bit_length() > 32 and theirs != mine
    other.ring(theirs, (other.arena(4096), 0))
    assert other.heard() is None  # shown out
    victim.ring(theirs, (victim.arena(4096), 0))
    assert victim.heard() is messages.MessageType.DONE


def test_memory_of_another_session_cannot_be_named(local: Callable[[str], Local]) -> None:
    victim, other = local("victim"), local("other")
    arena, prepared = victim.arena(4096), other.prepare((4,))
    other.ring(prepared, (arena, 0))
    assert other.heard() is None
    victim.ring(victim.prepare((4,)), (arena, 0))
    assert victim.heard() is messages.MessageType.DONE


@pytest.mark.parametrize(
    ("offset", "why"),
    [
        (4096, "behind the end"),
        (4081, "partly behind the end"),
        ((1 << 64) - 16, "the sum wraps to 0"),
        ((1 << 64) - 1, "the sum wraps into it"),
        (1 << 63, "negative where it is read with a sign"),
    ],
)
def test_an_offset_out_of_range_shows_its_sender_out_alone(
    local: Callable[[str], Local], offset: int, why: str
) -> None:
    victim, other = local("victim"), local("other")
    other.ring(other.prepare((4,)), (other.arena(4096), offset))
    assert other.heard() is None, why
    victim.ring(victim.prepare((4,)), (victim.arena(4096), 4096 - 16))
    assert victim.heard() is messages.MessageType.DONE


def test_memory_that_was_given_back_cannot_be_named_again(local: Callable[[str], Local]) -> None:
    one = local("one")
    arena, prepared = one.arena(4096), one.prepare((4,))
    one.socket.send(messages.encode_arena(messages.MessageType.ARENA_DROP, arena, 0))
    assert one.arena(4096) > arena  # by then the drop has been read; numbers are not given twice
    one.ring(prepared, (arena, 0))
    assert one.heard() is None


@pytest.mark.parametrize("size", [0, (1 << 64) - 1, 1 << 63])
def test_a_size_that_no_memory_has_is_refused_and_the_session_goes_on(local: Callable[[str], Local], size: int) -> None:
    one = local("one")
    one.socket.send(messages.encode_arena(messages.MessageType.ARENA_REQUEST, 0, size))
    answer = one.socket.recv(messages.MAX_MESSAGE)
    assert messages.parse_type(answer) is messages.MessageType.REFUSED
    assert not any(word in messages.parse_refused(answer)[1] for word in TELLTALE)
    assert one.arena(4096)


@pytest.mark.parametrize("shape", [(-1,), (-4, -4), (1 << 62, 4), (1 << 40, 1 << 40)])
def test_negative_and_absurd_lengths_are_refused(two: tuple[Raw, Raw], shape: tuple[int, ...]) -> None:
    victim, other = two
    collective = described(SUM, (1,))
    del collective.leaves[0].shape[:]
    with contextlib.suppress(ValueError):  # where the field cannot even say it
        collective.leaves[0].shape.extend(shape)
        code, said, _ = failure(lambda: list(other.call(other.header(collective), data([1.0]))))
        assert code in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED") and not any(word in said for word in TELLTALE)
    assert victim.submit(described(SUM, (1,)), data([21.0])).value == [21.0]


def test_results_of_others_cannot_be_released_by_guessing_their_numbers(local: Callable[[str], Local]) -> None:
    """A rank that says of every result that it needs it no longer takes none from the other."""
    victim, other = local(""), local("")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one, rank: one.join("shared", 2, rank), (victim, other), (0, 1)))
    prepared, arenas = {}, {}
    for one in (victim, other):
        prepared[one], arenas[one] = one.prepare((256,)), one.arena(4096)

    def together(instance: int) -> tuple[bytes, bytes]:
        for one in (victim, other):
            one.ring(prepared[one], (arenas[one], 0), instance=instance)
        return victim.done(), other.done()

    first = messages.parse_done(together(0)[0])
    assert first.has_result
    other.doorbell.send(messages.encode_release(tuple(range(200))))
    for instance in range(1, 12):
        later = messages.parse_done(together(instance)[0])
        assert (later.arena, later.offset, later.slot) != (first.arena, first.offset, first.slot)
        victim.doorbell.send(messages.encode_release((later.slot,)))


def test_a_doorbell_that_is_used_once_is_used_up(local: Callable[[str], Local]) -> None:
    one = local("one")
    again = one.enter(one.joined.door, one.joined.token)
    with again:
        assert again.recv(100) == b""
    one.ring(one.prepare((4,)), (one.arena(4096), 0))
    assert one.heard() is messages.MessageType.DONE


def test_the_hello_of_a_door_takes_a_token_of_one_length(local: Callable[[str], Local]) -> None:
    one = local("one")
    for said in (b"", b"CDL1", b"CDL1" + bytes(15), b"CDL1" + bytes(17), struct.pack("<4s16s", b"CDL1", bytes(16))):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guest:
            guest.settimeout(20)
            guest.connect(one.joined.door)
            if said:
                guest.send(said)
            else:
                guest.shutdown(socket.SHUT_WR)
            assert guest.recv(100) == b""


def test_a_group_of_somebody_elses_job_cannot_be_told_from_none_by_its_errors(two: tuple[Raw, Raw]) -> None:
    victim, other = two
    with pytest.raises(grpc.RpcError) as refused:
        other.stub.Leave(worker_pb2.LeaveRequest(session=other.opened.session, key=victim.key, rank=9), timeout=10)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND and "victim" not in str(refused.value.details())


@pytest.mark.parametrize("field", ["job", "visible_gpus"])
def test_a_session_with_a_text_longer_than_any_honest_one_is_refused(address: str, field: str) -> None:
    raw = Raw(address)
    request = worker_pb2.OpenSessionRequest(protocol=RANGE, pid=os.getpid())
    setattr(request, field, "1" * 5000)
    with pytest.raises(grpc.RpcError) as caught:
        next(raw.stub.OpenSession(request))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "5000 characters" in str(caught.value.details())
    raw.close()


def test_a_group_with_a_name_longer_than_any_honest_one_is_refused(address: str) -> None:
    raw = Raw(address)
    with pytest.raises(grpc.RpcError) as caught:
        raw.join("x" * 257, 1, 0)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    raw.close()
