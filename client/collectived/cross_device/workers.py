"""Where the other workers of the job are, as the session's own worker tells anybody who asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collectived.rpc import Worker

_ANSWER_WITHIN = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """A worker: the address at which it is connected to, and its devices in full."""

    address: str
    devices: tuple[str, ...]


def ask(rpc: Worker) -> dict[int, Whereabouts]:
    """All workers of the job by their task.

    Raises:
        CollectiveError: no answer.
    """
    from collectived_proto.v1 import status_pb2  # late, for it brings protobuf

    reply = rpc.status(status_pb2.StatusRequest(), _ANSWER_WITHIN)
    return {row.task: Whereabouts(row.address, tuple(row.devices)) for row in reply.workers if row.address}
