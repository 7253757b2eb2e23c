"""The health service of a daemon: whether it can serve. Also reflection, which lists its services to permitted callers.

The service without a name shows that the process lives and answers, from its start until it is asked to end. A named
service shows whether it can do its work *now*: a worker that does not reach its coordinator lives, and running
collectives go on, but no client can join. So a supervisor restarts by the first, and a balancer sends work by the
second.
"""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from collectived_runtime.startup_error import StartupError

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """The health service (`grpc.health.v1`) of one daemon, whose own service is `service`."""

    def __init__(self, service: str, server: grpc.aio.Server) -> None:
        self._service = service
        self._servicer = health.aio.HealthServicer()
        self._publish_tasks: set[asyncio.Task[None]] = set()
        self.is_healthy = False
        """Whether the service can do its work."""
        self._is_draining = False
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def start(self, well: bool = True) -> None:
        await self._servicer.set("", SERVING)
        await self._publish(well)

    def set_healthy(self, well: bool) -> None:
        """The service can do its work from now on, or cannot. Called in the event loop."""
        task = asyncio.get_running_loop().create_task(self._publish(well))
        self._publish_tasks.add(task)
        task.add_done_callback(self._publish_tasks.discard)

    async def drain(self) -> None:
        """Say for good that nothing new is taken."""
        self._is_draining = True
        await self._servicer.set("", NOT_SERVING)
        await self._publish(False)

    async def _publish(self, well: bool) -> None:
        well = well and not self._is_draining
        self.is_healthy = well
        await self._servicer.set(self._service, SERVING if well else NOT_SERVING)

    async def stop(self) -> None:
        """The daemon is ending: nothing of it serves any more, whatever is said later."""
        self.is_healthy = False
        await self._servicer.enter_graceful_shutdown()


def add_reflection(server: grpc.aio.Server, *services: str) -> None:
    """Add the reflection service, so that tools need no .proto files.

    Raises:
        StartupError: the package that does it is not installed.
    """
    try:
        from grpc_reflection.v1alpha import reflection
    except ImportError:
        raise StartupError(
            "--reflection needs the package grpcio-reflection, which is not installed: "
            "pip install 'collectived[reflection]'"
        ) from None
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
