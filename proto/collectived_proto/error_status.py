"""Errors to and from gRPC statuses: one table each way, and the verdict in the status' details.

An RPC fails with the canonical code, the message, and, where a group failed, a packed `collectived.v1.Verdict`.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.rpc import status_pb2
from grpc_status import rpc_status

from collectived_proto.codec import verdict_from_proto, verdict_to_proto
from collectived_proto.errors import Code, CollectiveError, UnavailableError, error_class, error_from_verdict
from collectived_proto.v1 import common_pb2

_OUR_WORDS = (
    ("deadline exceeded", "no answer in time"),
    ("ping timeout", "it is silent: it is stopped, or the network is interrupted"),
    ("no such file or directory", "its socket does not exist"),
    ("connection refused", "the connection was refused: nothing listens there"),
    ("permission denied", "this user may not connect to it"),
    ("errors resolving", "its host name is not known"),
    ("no route to host", "there is no way to its host"),
    ("network is unreachable", "there is no way to its host"),
    ("timed out", "its host does not answer"),
    ("failed parsing http/2", "something else answers there"),
    ("wrong type for socket", "something else answers there"),
    ("connection reset", "the connection was closed"),
    ("broken pipe", "the connection was closed"),
    ("socket closed", "the connection was closed"),
    ("endpoint closing", "the connection was closed"),
    ("goaway", "the connection was closed"),
)
"""Texts of gRPC about a connection, in lower case, and the text that replaces each. The first one found counts."""
_ABOUT_CONNECTIONS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)


def to_status(error: CollectiveError) -> grpc.Status:
    """Return the status that a servicer aborts with."""
    message = status_pb2.Status(code=error.code, message=str(error))
    if error.verdict is not None:
        packed = any_pb2.Any()
        packed.Pack(verdict_to_proto(error.verdict))
        message.details.append(packed)
    status: grpc.Status = rpc_status.to_status(message)
    return status


def has_status(error: Exception) -> bool:
    """Whether a failed call was answered by a servicer, with a text of its own, and not ended by gRPC."""
    return isinstance(error, grpc.Call) and rpc_status.from_call(error) is not None


def describe_failure(error: grpc.RpcError) -> str:
    """Why a call failed, for people: what a servicer says, or what has come of the connection."""
    code, details = error.code(), error.details() or ""
    if code in _ABOUT_CONNECTIONS and not has_status(error):
        details = next((ours for theirs, ours in _OUR_WORDS if theirs in details.lower()), details)
    return details or str(code.name)


def from_rpc_error(error: grpc.RpcError, target: str) -> CollectiveError:
    """The exception that a failed call to `target` is raised as."""
    if not isinstance(error, grpc.Call):
        return UnavailableError(f"{target} cannot be reached: {error}")
    status = rpc_status.from_call(error)
    if status is not None:
        verdict = common_pb2.Verdict()
        for detail in status.details:
            if detail.Unpack(verdict):
                return error_from_verdict(verdict_from_proto(verdict))
    code = Code(error.code().value[0])
    details = describe_failure(error)
    if code in (Code.UNAVAILABLE, Code.UNKNOWN) and status is None:
        return UnavailableError(f"{target} cannot be reached: {details}")
    return error_class(code)(details)
