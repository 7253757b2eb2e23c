"""A worker that was given no number asks its coordinator for one, before it is anybody."""

from __future__ import annotations

import grpc
import grpc.aio

from collectived_proto.errors import UnavailableError
from collectived_proto.v1 import coordinator_pb2, coordinator_pb2_grpc
from collectived_runtime.admission import client_metadata
from collectived_runtime.certificates import Certificates
from collectived_runtime.daemon import OPTIONS
from collectived_runtime.worker.membership import RECONNECT


async def enlist(address: str, secret: str, host: str, patience: float, tls: Certificates) -> int:
    """The number of this host's worker, by the coordinator at `address`, for which it looks so many seconds.

    Raises:
        UnavailableError: it did not answer, or refused.
    """
    if reason := await tls.why_not(address):
        raise UnavailableError(f"the coordinator at {address} cannot be used: {reason}")
    async with tls.channel(address, (*OPTIONS, *RECONNECT)) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        try:
            reply = await stub.Enlist(
                coordinator_pb2.EnlistRequest(host=host),
                timeout=patience or None,
                metadata=client_metadata(address, secret),
                wait_for_ready=True,
            )
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(_why(error, address, patience)) from error
    return int(reply.task)


def _why(error: grpc.aio.AioRpcError, address: str, patience: float) -> str:
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return (
                f"the coordinator at {address} did not answer within {patience:g} s; is it running, and is this its "
                "address?"
            )
        case grpc.StatusCode.UNIMPLEMENTED:
            return f"the coordinator at {address} is of a release that gives no numbers to workers: give --task"
        case _:
            return f"the coordinator at {address} refuses this worker: {error.details()}"
