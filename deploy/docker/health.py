"""Whether the daemon of this container serves, by its gRPC health service: exit status 0 or 1.

    python health.py [ADDRESS]

Without ADDRESS: the worker at /run/collectived/worker.sock where there is one, else the coordinator at port 7450.
"""

from __future__ import annotations

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from collectived_proto.ipc.job_files import find_system_worker
from collectived_proto.tls.client import channel_credentials
from collectived_proto.tls.files import TlsFiles, load_material

SECONDS = 4.0  # less than HEALTHCHECK gives it


def channel_to(address: str) -> grpc.Channel:
    """Open a channel with the certificates that the environment names for the daemon too."""
    options, named = [("grpc.enable_http_proxy", 0)], TlsFiles.from_environment(os.environ)
    if not named or address.startswith("unix:"):
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(load_material(named)), options=options)


def main() -> None:
    address = sys.argv[1] if sys.argv[1:] else find_system_worker() or "127.0.0.1:7450"
    with channel_to(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        except grpc.RpcError as error:
            sys.exit(f"{address}: {error.code().name}: {error.details()}")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        sys.exit(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")


if __name__ == "__main__":
    main()
