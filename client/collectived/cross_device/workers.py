"""Where the other workers of the job are, as the session's own worker tells anybody who asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from collectived.errors import DeadlineExceededError, UnavailableError

if TYPE_CHECKING:
    from collectived.connection.rpc import WorkerClient


@dataclass(frozen=True, slots=True)
class WorkerLocation:
    """A worker: the address at which it is connected to, and its devices in full."""

    address: str
    devices: tuple[str, ...]


def fetch_workers(rpc: WorkerClient, timeout: float) -> dict[int, WorkerLocation]:
    """All workers of the job by their task; `timeout` is in seconds.

    Raises:
        UnavailableError: no answer in time. CollectiveError: the worker refuses.
    """
    from collectived_proto.v1 import status_pb2  # late, for it brings protobuf

    try:
        reply = rpc.status(status_pb2.StatusRequest(), timeout)
    except DeadlineExceededError:
        raise UnavailableError(
            f"{rpc.name} has not answered within {timeout:.3g} s where the job's other workers are; one may be stopped"
        ) from None
    return {row.task: WorkerLocation(row.address, tuple(row.devices)) for row in reply.workers if row.address}
