"""A status as JSON, for people and their programs: protobuf's, with the names of the fields but for one."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.json_format import MessageToDict

from collectived_proto.v1.status_pb2 import StatusReply

RENAMED = {"lanes": "groups"}  # of a worker: as everywhere else, its groups are called groups


def status_to_json(reply: StatusReply, indent: int | None = 2) -> str:
    """All fields, also those that are 0 or empty."""
    document: dict[str, Any] = MessageToDict(
        reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    document["workers"] = [
        {RENAMED.get(name, name): value for name, value in worker.items()} for worker in document["workers"]
    ]
    return json.dumps(document, indent=indent)
