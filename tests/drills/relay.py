"""A relay before the coordinator that tells it other link addresses than workers have: those of the drills' proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from collectived_proto.v1 import coordinator_pb2, coordinator_pb2_grpc, status_pb2


class Relay(coordinator_pb2_grpc.CoordinatorServicer):
    """Serves `collectived.v1.Coordinator` at a path, by asking the real one.

    Args:
        path: of the Unix socket to serve at.
        coordinator: address of the real one.
        door_to: from a worker's task and its link address to the address that others are to be told.
    """

    def __init__(self, path: str, coordinator: str, door_to: Callable[[int, str], str]) -> None:
        self._coordinator = coordinator
        self._door_to = door_to
        self._server = grpc.server(ThreadPoolExecutor(32))
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait(5)

    def Attach(
        self, requests: Iterator[coordinator_pb2.WorkerMessage], context: grpc.ServicerContext
    ) -> Iterator[coordinator_pb2.CoordinatorMessage]:
        with grpc.insecure_channel(self._coordinator) as channel:
            call = coordinator_pb2_grpc.CoordinatorStub(channel).Attach(self._told(requests))
            context.add_callback(call.cancel)
            try:
                yield from call
            except grpc.RpcError as error:
                context.abort(error.code(), error.details() or "the coordinator has ended the stream")
            finally:
                call.cancel()

    def Status(self, request: status_pb2.StatusRequest, context: Any) -> status_pb2.StatusReply:
        with grpc.insecure_channel(self._coordinator) as channel:
            try:
                reply: status_pb2.StatusReply = coordinator_pb2_grpc.CoordinatorStub(channel).Status(request, timeout=5)
                return reply
            except grpc.RpcError as error:
                context.abort(error.code(), error.details() or "the coordinator does not answer")
                raise

    def _told(self, requests: Iterator[coordinator_pb2.WorkerMessage]) -> Iterator[coordinator_pb2.WorkerMessage]:
        for message in requests:
            if message.HasField("hello"):
                message.hello.link_address = self._door_to(message.hello.task, message.hello.link_address)
            yield message
