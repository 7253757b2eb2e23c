"""Clients of other versions of the protocol at a living worker."""

from __future__ import annotations

import socket
from typing import Any

import grpc
import pytest

from collectived_proto.local import wire
from collectived_proto.protocol import OURS, Versions
from collectived_proto.v1 import common_pb2, status_pb2, worker_pb2, worker_pb2_grpc

PATIENCE = 10.0
# OpenSessionRequests as clients of the first protocol have sent them: that it is the first, and nothing at all.
RECORDED = bytes.fromhex("0a0b080110011a05302e312e30120168180722016c2a0876657273696f6e733001")
RECORDED_BARE = bytes.fromhex("12016818072a0876657273696f6e733001")


@pytest.fixture
def channel(one_worker: Any) -> Any:
    with grpc.insecure_channel(one_worker.addresses[0], [("grpc.use_local_subchannel_pool", 1)]) as found:
        yield found


def opened(channel: grpc.Channel, request: bytes) -> tuple[Any, worker_pb2.SessionOpened]:
    """The stream of a session that these bytes open, and what the worker says of it."""
    call: Any = channel.unary_stream("/collectived.v1.Worker/OpenSession")
    life = call(request, timeout=PATIENCE)
    return life, worker_pb2.SessionEvent.FromString(next(life)).opened


@pytest.mark.parametrize("request_bytes", [RECORDED, RECORDED_BARE], ids=["first", "silent"])
def test_a_client_of_the_first_protocol_is_served(channel: grpc.Channel, request_bytes: bytes) -> None:
    life, told = opened(channel, request_bytes)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as session:
        session.settimeout(PATIENCE)
        session.connect(told.door)
        session.send(b"CDL1" + told.token)  # a hello without versions
        assert wire.kind_of(session.recv(100)) is wire.Kind.PONG
    life.cancel()


def test_a_client_of_no_version_that_the_worker_speaks_hears_which_of_the_two_is_to_be_upgraded(
    channel: grpc.Channel,
) -> None:
    future = common_pb2.Protocol(lowest=7, highest=9, release="9.9.9")
    with pytest.raises(grpc.RpcError) as error:
        opened(channel, worker_pb2.OpenSessionRequest(protocol=future).SerializeToString())
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.value.details() == (
        f"the client (release 9.9.9, protocol 7 to 9) and this worker ({OURS}) have no version of the protocol in "
        "common: upgrade this worker to a release that speaks protocol 7"
    )


def test_status_tells_what_the_worker_and_its_clients_speak(channel: grpc.Channel) -> None:
    said = common_pb2.Protocol(lowest=1, highest=3, release="0.3.0")
    life, _ = opened(channel, worker_pb2.OpenSessionRequest(protocol=said, job="versions").SerializeToString())
    (worker,) = (
        worker_pb2_grpc.WorkerStub(channel).Status(status_pb2.StatusRequest(local_only=True), timeout=PATIENCE).workers
    )
    assert said in worker.clients and "0.3.0" in worker.client_releases
    assert Versions(worker.protocol.lowest, worker.protocol.highest, worker.protocol.release) == OURS
    life.cancel()
