"""What is no message of its protocol is refused where it comes, and counted; the worker goes on."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from benchmarks.floods import open_doorbell
from tests.e2e.conftest import SECRET, Cluster
from tests.e2e.raw_client import SUM, described, failure
from tests.e2e.rejection_counts import counted, counting

import collectived as cd
from collectived_proto.ipc import messages
from collectived_proto.v1 import common_pb2, status_pb2, worker_pb2, worker_pb2_grpc
from collectived_runtime.transport.hello import ANSWER_BYTES, HELLO_BYTES, NONCE_BYTES, PROOF_BYTES, LinkHello, proof

MALFORMED = "collectived_malformed_total"
HELLO = LinkHello(1, 0, 1 << 40, 1 << 41, 0, bytes(NONCE_BYTES)).encode()


@pytest.fixture(scope="module")
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(1, worker_options=("--metrics", "0", "--listen", "127.0.0.1:0"))


@pytest.fixture(autouse=True)
def goes_on(cluster: Cluster) -> Iterator[None]:
    yield
    assert cluster.run(2, lambda group: group.all_reduce("sum", 1)) == [2, 2]
    assert "Traceback" not in cluster.log


@contextlib.contextmanager
def knocking(cluster: Cluster) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guest:
        guest.connect(str(cluster.folder / "door-0.sock"))
        guest.settimeout(20)
        yield guest


def hung_up(guest: socket.socket) -> bool:
    """Whether the worker closes it; what it says before is let go."""
    try:
        while guest.recv(messages.MAX_MESSAGE):
            pass
    except ConnectionResetError:  # it did not read all of it
        pass
    return True


@pytest.mark.parametrize(
    "words",
    [
        messages.encode_hello(bytes(messages.TOKEN_BYTES))[:-1],
        messages.encode_hello(bytes(messages.TOKEN_BYTES)) + b"more",
        b"CDL9" + bytes(messages.TOKEN_BYTES),
        messages.encode_hello(os.urandom(messages.TOKEN_BYTES)),
        os.urandom(200),
        os.urandom(60_000),
    ],
    ids=["truncated", "longer", "another version", "another token", "random", "oversized"],
)
def test_at_the_door(cluster: Cluster, words: bytes) -> None:
    with counting(cluster.metrics[1], "socket", MALFORMED), knocking(cluster) as guest:
        guest.send(words)
        assert hung_up(guest)


@contextlib.contextmanager
def opened(cluster: Cluster) -> Iterator[worker_pb2.SessionOpened]:
    with grpc.insecure_channel(cluster.addresses[0], [("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = worker_pb2.OpenSessionRequest(
            protocol=common_pb2.Protocol(lowest=1, highest=1),
            pid=os.getpid(),
            job="test",
            local=True,
        )
        life = worker_pb2_grpc.WorkerStub(channel).OpenSession(request)
        yield next(life).opened
        life.cancel()


def test_a_token_opens_once(cluster: Cluster) -> None:
    with opened(cluster) as session, knocking(cluster) as first:
        first.send(messages.encode_hello(session.token))
        assert first.recv(100)[0] == messages.MessageType.PONG
        with counting(cluster.metrics[1], "socket", MALFORMED), knocking(cluster) as again:
            again.send(messages.encode_hello(session.token))
            assert hung_up(again)


@pytest.mark.parametrize(
    "words",
    [
        messages.encode_arena(messages.MessageType.ARENA_REQUEST, 0, 64)[:-1],
        messages.encode_arena(messages.MessageType.ARENA_REQUEST, 0, 64) + b"more",
        messages.encode_bare(messages.MessageType.PING),
        b"\xfe" + os.urandom(15),
        b"\xff" * 60_000,
    ],
    ids=["truncated", "longer", "of a doorbell", "random", "oversized"],
)
def test_at_a_session_socket(cluster: Cluster, words: bytes) -> None:
    with opened(cluster) as session, knocking(cluster) as guest:
        guest.send(messages.encode_hello(session.token))
        assert guest.recv(100)[0] == messages.MessageType.PONG
        with counting(cluster.metrics[1], "session", MALFORMED):
            guest.send(words)
            assert hung_up(guest)


RING = messages.Submit(1, 2, 0, 0.0, True, ((0, 0),))


@pytest.mark.parametrize(
    "words",
    [
        lambda generation: RING.encode()[:10],
        lambda generation: RING.encode() + b"more",
        lambda generation: RING._replace(generation=generation).encode(),
        lambda generation: messages.encode_arena(messages.MessageType.ARENA_REQUEST, 0, 64),
        lambda generation: b"\xfe" + os.urandom(100),
        lambda generation: b"\xff" * 60_000,
        lambda generation: RING.encode()[:32] + struct.pack("<d", float("nan")) + RING.encode()[40:],
    ],
    ids=["truncated", "longer", "never prepared", "of a session", "random", "oversized", "no time"],
)
def test_at_a_doorbell(cluster: Cluster, words: Callable[[int], bytes]) -> None:
    name = f"doorbell-{os.urandom(4).hex()}"
    with (
        open_doorbell(cluster.addresses[0], name) as (doorbell, generation),
        counting(cluster.metrics[1], "doorbell", MALFORMED),
    ):
        doorbell.send(words(generation))
        assert hung_up(doorbell)


@pytest.mark.parametrize(
    ("instance", "address"),
    [
        (5, (0, 0)),
        (0, (77, 0)),
        (0, (0, 1 << 40)),
        (0, (0, (1 << 64) - 4)),
        (0, (0, (1 << 64) - 1)),
        (0, ((1 << 32) - 1, (1 << 64) - 1)),
    ],
    ids=["reordered", "another arena", "beyond", "wraps to its end", "wraps past zero", "all ones"],
)
def test_addresses_and_numbers_that_cannot_be(cluster: Cluster, instance: int, address: tuple[int, int]) -> None:
    """The client owns 4 KiB. Lengths follow from dtype and shape, which were described before: only places can lie."""
    with grpc.insecure_channel(cluster.addresses[0], [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        with opened(cluster) as session, knocking(cluster) as mine:
            mine.send(messages.encode_hello(session.token))
            mine.recv(100)
            mine.send(messages.encode_arena(messages.MessageType.ARENA_REQUEST, 0, 4096))
            message, descriptors, _, _ = socket.recv_fds(mine, 100, 1)
            os.close(descriptors[0])
            arena = messages.parse_arena(message)[0]
            *_, last = stub.Join(
                worker_pb2.JoinRequest(
                    session=session.session, name=f"lies-{os.urandom(4).hex()}", min_size=1, max_size=1, rank=0
                ),
                timeout=20,
            )
            group = last.joined.group
            prepared = stub.Prepare(
                worker_pb2.PrepareRequest(
                    session=session.session, key=group.key, rank=0, collective=described(SUM, (1024,))
                ),
                timeout=20,
            )
            with knocking(cluster) as doorbell:
                doorbell.send(messages.encode_hello(last.joined.token))
                place = (arena, address[1]) if not address[0] else address
                ring = messages.Submit(group.generation, prepared.id, instance, 0.0, False, (place,))
                with counting(cluster.metrics[1], "doorbell", MALFORMED):
                    doorbell.send(ring.encode())
                    assert hung_up(doorbell)


def link_port(cluster: Cluster) -> tuple[str, int]:
    with grpc.insecure_channel(cluster.addresses[0], [("grpc.use_local_subchannel_pool", 1)]) as channel:
        reply = worker_pb2_grpc.WorkerStub(channel).Status(status_pb2.StatusRequest(local_only=True), timeout=20)
    host, _, port = reply.workers[0].link_address.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize(
    "words",
    [
        HELLO[:-1],
        b"CDL\x02" + HELLO[4:],
        HELLO[:4] + struct.pack("<HH", 900, 901) + HELLO[8:],
        HELLO[:12] + struct.pack("<I", 7) + HELLO[16:],
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n" + bytes(HELLO_BYTES),
        os.urandom(HELLO_BYTES),
    ],
    ids=["truncated", "another magic", "another version", "another worker", "another protocol", "random"],
)
def test_at_the_port_for_links(cluster: Cluster, words: bytes) -> None:
    with (
        counting(cluster.metrics[1], "handshake", MALFORMED),
        socket.create_connection(link_port(cluster), 20) as guest,
    ):
        guest.sendall(words)
        with contextlib.suppress(OSError):  # it has been closed already
            guest.shutdown(socket.SHUT_WR)
        assert hung_up(guest)


@pytest.mark.parametrize("said", ["wrong", "replayed", "reflected"])
def test_a_proof_that_is_none(cluster: Cluster, said: str) -> None:
    with (
        counting(cluster.metrics[1], "handshake", MALFORMED),
        socket.create_connection(link_port(cluster), 20) as guest,
    ):
        guest.sendall(HELLO)
        answer = guest.recv(ANSWER_BYTES, socket.MSG_WAITALL)
        shown = {
            "wrong": os.urandom(PROOF_BYTES),
            "replayed": proof(SECRET, "dial", HELLO, bytes(NONCE_BYTES)),  # right for another nonce of the acceptor
            "reflected": answer[NONCE_BYTES:],
        }[said]
        guest.sendall(shown)
        assert hung_up(guest)


@pytest.mark.parametrize("method", ["OpenSession", "Join", "Prepare", "Submit", "Abort", "Leave", "Status", "Drain"])
def test_over_grpc(cluster: Cluster, method: str) -> None:
    with counting(cluster.metrics[1], "grpc", MALFORMED), grpc.insecure_channel(cluster.addresses[0]) as channel:
        call: Any = channel.stream_stream(f"/collectived.v1.Worker/{method}")
        code, text, _ = failure(lambda: list(call(iter([b"\xff\xff\xff"]), timeout=20)))
    assert code == "INVALID_ARGUMENT" and method in text


def test_what_is_well_formed_counts_nothing(cluster: Cluster) -> None:
    before = counted(cluster.metrics[1])
    with cd.connect(cluster.addresses[0]) as session, session.join("well-formed", 1, timeout=20) as group:
        assert group.all_reduce("sum", [1, 2.0]) == [1, 2.0]
    assert counted(cluster.metrics[1]) == before
