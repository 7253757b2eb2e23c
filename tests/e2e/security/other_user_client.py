"""A client of another user: what it is told by a worker or a coordinator, call by call, as JSON on its output.

`python -m tests.e2e.security.other_user_client ADDRESS UID GROUPS CALL…`, with the groups as numbers with commas
between them. Python and what it imports may lie where others may not look, so all is called once before this process
becomes that user.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import grpc

import collectived as cd
from collectived_proto.v1 import common_pb2, coordinator_pb2_grpc, status_pb2, worker_pb2, worker_pb2_grpc


def shown() -> list[tuple[str, str]]:
    secret = os.environ.get("COLLECTIVED_SECRET", "")
    return [("authorization", f"Bearer {secret}")] if secret else []


def channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


def status(address: str) -> str:
    with channel(address) as line:
        stub = worker_pb2_grpc.WorkerStub(line)
        return str(stub.Status(status_pb2.StatusRequest(local_only=True), timeout=20, metadata=shown()).answered_by)


def coordinator_status(address: str) -> str:
    with channel(address) as line:
        stub = coordinator_pb2_grpc.CoordinatorStub(line)
        return str(stub.Status(status_pb2.StatusRequest(), timeout=20, metadata=shown()).answered_by)


def drain(address: str) -> str:
    with channel(address) as line:
        request = status_pb2.DrainRequest(group="no such group", timeout_seconds=0.1)
        worker_pb2_grpc.WorkerStub(line).Drain(request, timeout=20, metadata=shown())
    return "drained"


def open_session(address: str) -> str:
    with channel(address) as line:
        request = worker_pb2.OpenSessionRequest(protocol=common_pb2.Protocol(lowest=1, highest=1), local=True)
        stream = worker_pb2_grpc.WorkerStub(line).OpenSession(request, timeout=20, metadata=shown())
        opened = next(stream).opened
        stream.cancel()
        return str(opened.worker)


def collective(address: str) -> str:
    with cd.connect(address, timeout=20) as session, session.join(f"of-{os.getuid()}", 1) as group:
        assert group.all_reduce("sum", 21.0) == 21.0
        return session.transport


CALLS: dict[str, Callable[[str], str]] = {
    one.__name__: one for one in (status, coordinator_status, drain, open_session, collective)
}


def outcome(call: Callable[[str], str], address: str) -> list[str]:
    """["ok", what came], or [code, message]."""
    try:
        return ["ok", call(address)]
    except grpc.RpcError as error:
        return [error.code().name, error.details() or ""]
    except cd.errors.CollectiveError as error:
        return [error.code.name, str(error)]


def main(address: str, uid: str, groups: str, *calls: str) -> None:
    for call in calls:
        outcome(CALLS[call], address)
    os.setgroups([int(group) for group in groups.split(",")])
    os.setgid(int(groups.split(",")[0]))
    os.setuid(int(uid))
    found: dict[str, Any] = {call: outcome(CALLS[call], address) for call in calls}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
