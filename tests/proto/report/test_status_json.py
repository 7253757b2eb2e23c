"""A status as JSON has all fields, and a worker's groups are called groups."""

from __future__ import annotations

import json

from google.protobuf.json_format import ParseDict

from collectived_proto.report.status_json import RENAMED, status_to_json
from collectived_proto.v1 import status_pb2 as pb

REPLY = pb.StatusReply(workers=[pb.WorkerStatus(task=1, lanes=[pb.LaneStatus(group="world", key=1 << 60)])])


def test_the_groups_of_a_worker_are_called_groups_and_all_else_is_as_in_the_protocol() -> None:
    document = json.loads(status_to_json(REPLY))
    (worker,) = document["workers"]
    assert set(document) | {"coordinator"} == {field.name for field in pb.StatusReply.DESCRIPTOR.fields}
    assert worker["groups"][0]["group"] == "world" and worker["groups"][0]["key"] == str(1 << 60)
    names = [field.name for field in pb.WorkerStatus.DESCRIPTOR.fields if not field.has_presence]
    assert {RENAMED.get(name, name) for name in names} <= set(worker) and "lanes" not in worker
    worker["lanes"] = worker.pop("groups")
    assert ParseDict(document, pb.StatusReply()) == REPLY
