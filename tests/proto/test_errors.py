"""Errors: a tree that people can see, and that survives the trip through a gRPC status."""

from __future__ import annotations

import builtins
from typing import Any

import grpc
import pytest

from collectived_proto import error_status, errors
from collectived_proto.errors import Code, CollectiveError, error_class, error_from_verdict
from collectived_proto.types import Member, Verdict
from collectived_proto.v1 import common_pb2

CLASSES = [error_class(code) for code in Code if error_class(code).code is code]
MEMBER = Member(2, "CPU:0", 0, "a", 12)


def verdict(code: Code, successor: int = 0) -> Verdict:
    return Verdict("train", 1, 2, code, "rank 2 is gone", 5, 6, "barrier()", (MEMBER,), (), successor, "worker 1")


class Failed(grpc.RpcError, grpc.Call):
    """A failed call, made from a status as a server would send it."""

    def __init__(self, sent: grpc.Status) -> None:
        self._sent = sent

    def code(self) -> grpc.StatusCode:
        return self._sent.code

    def details(self) -> str:
        return str(self._sent.details)

    def trailing_metadata(self) -> Any:
        return self._sent.trailing_metadata

    def initial_metadata(self) -> Any:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> Any:
        return None

    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: object) -> bool:
        return False


def grpc_status(code: grpc.StatusCode, details: str) -> grpc.Status:
    """Return what gRPC itself ends a call with."""
    sent = grpc.Status()
    sent.code, sent.details, sent.trailing_metadata = code, details, ()
    return sent


def test_every_class_of_the_tree_is_in_its_picture() -> None:
    picture = errors.__doc__ or ""
    assert all(kind.__name__ in picture for kind in CLASSES)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_comes_out_of_a_status_as_it_went_in(kind: type[CollectiveError]) -> None:
    received = error_status.from_rpc_error(Failed(error_status.to_status(kind("what happened"))), "the worker")
    assert type(received) is kind and str(received) == "what happened" and received.verdict is None


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("Stream removed (ping timeout)", "it is silent: it is stopped, or the network is interrupted"),
        ("Stream removed (recvmsg:Connection reset by peer (104))", "the connection was closed"),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote "
            "host: Connection refused",
            "the connection was refused: nothing listens there",
        ),
        (
            "failed to connect to all addresses; last error: FAILED_PRECONDITION: unix:/run/door.sock: connect failed: "
            "addr: unix:/run/door.sock error: Protocol wrong type for socket",
            "something else answers there",
        ),
        ("the coordinator is stopping", "the coordinator is stopping"),
        ("", "UNAVAILABLE"),
    ],
)
def test_what_grpc_says_of_a_connection_is_told_in_our_words(theirs: str, ours: str) -> None:
    failed = Failed(grpc_status(grpc.StatusCode.UNAVAILABLE, theirs))
    assert error_status.describe_failure(failed) == ours
    error = error_status.from_rpc_error(failed, "the worker")
    assert type(error) is errors.UnavailableError and str(error) == f"the worker cannot be reached: {ours}"


def test_a_servicer_may_say_what_grpc_says() -> None:
    said = errors.UnavailableError("rank 2 is lost: ping timeout")
    assert str(error_status.from_rpc_error(Failed(error_status.to_status(said)), "the worker")) == str(said)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_verdict_rides_along(kind: type[CollectiveError]) -> None:
    sent = error_from_verdict(verdict(kind.code))
    received = error_status.from_rpc_error(Failed(error_status.to_status(sent)), "the worker")
    assert type(received) is kind and received.verdict == sent.verdict
    assert (received.group, received.generation, received.instance, received.op) == ("train", 2, 6, "barrier()")
    assert received.missing == (MEMBER,) and received.decided_by == "worker 1"


def test_whether_to_join_again_follows_from_the_successor() -> None:
    assert error_from_verdict(verdict(Code.UNAVAILABLE)).rejoin
    assert not error_from_verdict(verdict(Code.INVALID_ARGUMENT, successor=3)).rejoin
    assert not errors.InvalidArgumentError("of one caller alone").rejoin


def test_errors_are_what_users_of_python_expect() -> None:
    assert issubclass(errors.InvalidArgumentError, ValueError)
    assert issubclass(errors.DeadlineExceededError, builtins.TimeoutError)


def test_a_code_that_nobody_should_send_is_an_internal_error() -> None:
    assert error_class(15) is errors.InternalError
    assert common_pb2.Verdict(code=99).code == 99 and error_class(99) is errors.InternalError
