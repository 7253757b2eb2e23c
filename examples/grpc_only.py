"""A rank without the client library: grpcio and the generated code alone, as a client in any language would do it.

    collectived launch --workers 2 --clients 2 -- python examples/grpc_only.py

or, for a rank on a host without a worker, with the worker's address, the job's secret and the rank given by hand:

    export COLLECTIVED_WORKER=gpu7:7451 COLLECTIVED_SECRET_FILE=secret COLLECTIVED_JOB=night RANK=0 WORLD_SIZE=2
    python examples/grpc_only.py

`docs/guide/grpc.md` explains every step.
"""

from __future__ import annotations

import os
import socket
from array import array
from collections.abc import Iterator
from pathlib import Path

import grpc
from google.rpc import status_pb2

from collectived_proto.v1 import common_pb2, worker_pb2, worker_pb2_grpc

CHUNK = 1 << 20  # bytes: no data message may have more
STATUS = "grpc-status-details-bin"  # where gRPC puts a google.rpc.Status


class Rank:
    """One rank of one group. Values here are lists of floats, sent as float32[n]."""

    def __init__(self, stub: worker_pb2_grpc.WorkerStub, metadata: list[tuple[str, str]]) -> None:
        self._stub = stub
        self._metadata = metadata
        # The session lasts as long as this stream is open.
        request = worker_pb2.OpenSessionRequest(
            protocol=common_pb2.Protocol(lowest=1, highest=1),
            host=socket.gethostname(),
            pid=os.getpid(),
            job=os.environ.get("COLLECTIVED_JOB", "default"),
        )
        self._life = stub.OpenSession(request, metadata=metadata)
        self._session = next(self._life).opened.session

    def join(self, name: str, size: int, rank: int) -> None:
        """Waits until all ranks are there."""
        request = worker_pb2.JoinRequest(session=self._session, name=name, min_size=size, max_size=size, rank=rank)
        for event in self._stub.Join(request, metadata=self._metadata, timeout=30):
            if event.HasField("progress"):
                print(event.progress.text)
            else:
                self._group, self.rank = event.joined.group, event.joined.rank

    def all_reduce(self, op: common_pb2.ReduceOp, values: list[float]) -> list[float]:
        collective = described([len(values)])
        collective.all_reduce.reduce_op = op
        return self._submit(collective, values)

    def broadcast(self, values: list[float], root: int) -> list[float]:
        """The root's values on every rank. Only the root's length and bytes count: the others take what comes."""
        if self.rank == root:
            collective = described([len(values)])
        else:
            collective, values = common_pb2.Collective(open=True), []
        collective.broadcast.root = root
        return self._submit(collective, values)

    def leave(self) -> None:
        reply = self._stub.Leave(
            worker_pb2.LeaveRequest(session=self._session, key=self._group.key, rank=self.rank),
            metadata=self._metadata,
        )
        if reply.HasField("unseen"):
            raise RuntimeError(reply.unseen.message)
        self._life.cancel()

    def _submit(self, collective: common_pb2.Collective, values: list[float]) -> list[float]:
        header = worker_pb2.SubmitHeader(
            session=self._session, key=self._group.key, rank=self.rank, collective=collective, timeout_seconds=30
        )
        data = array("f", values).tobytes()

        def requests() -> Iterator[worker_pb2.SubmitRequest]:
            yield worker_pb2.SubmitRequest(header=header)
            for start in range(0, len(data), CHUNK):
                yield worker_pb2.SubmitRequest(data=data[start : start + CHUNK])

        result = array("f")
        for reply in self._stub.Submit(requests(), metadata=self._metadata):
            if reply.HasField("result"):
                print(f"rank {self.rank}: a result of shape {[list(leaf.shape) for leaf in reply.result.leaves]}")
            else:
                result.frombytes(reply.data)
        return result.tolist()


def described(shape: list[int]) -> common_pb2.Collective:
    """A value that is one array of float32, and not in any list or dict."""
    leaf = common_pb2.Leaf(path="", dtype=common_pb2.FLOAT32, shape=shape)
    return common_pb2.Collective(structure="*", leaves=[leaf], site="grpc_only.py")


def verdict_of(error: grpc.RpcError) -> common_pb2.Verdict | None:
    """The verdict about the group, if a collective failed; None if only the call was refused."""
    for entry in error.trailing_metadata() or ():
        if entry.key == STATUS:
            for detail in status_pb2.Status.FromString(entry.value).details:
                verdict = common_pb2.Verdict()
                if detail.Unpack(verdict):
                    return verdict
    return None


def channel_to(address: str) -> grpc.Channel:
    """In plain text, or over TLS where the environment names an authority and, for workers that ask, a certificate."""
    files = [os.environ.get(f"COLLECTIVED_TLS_{which}") for which in ("CA", "KEY", "CERT")]
    if not files[0] or address.startswith("unix:"):
        return grpc.insecure_channel(address)
    ca, key, certificate = [Path(file).read_bytes() if file else None for file in files]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate))


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    secret = os.environ.get("COLLECTIVED_SECRET_FILE")
    metadata = [("authorization", f"Bearer {Path(secret).read_text().strip()}")] if secret else []
    with channel_to(os.environ["COLLECTIVED_WORKER"]) as channel:
        me = Rank(worker_pb2_grpc.WorkerStub(channel), metadata)
        me.join(os.environ.get("COLLECTIVED_GROUP", "world"), size, rank)

        total = me.all_reduce(common_pb2.SUM, [1.0, 2.0, float(rank)])
        assert total == [size, 2 * size, sum(range(size))], total

        weights = me.broadcast([0.5] * 1_000_000 if rank == 0 else [], root=0)
        assert weights == [0.5] * 1_000_000

        try:  # all ranks get an error that says which rank differs, and how
            me.all_reduce(common_pb2.SUM, [0.0] * (3 if rank == size - 1 else 2))
        except grpc.RpcError as error:
            verdict = verdict_of(error)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and verdict is not None
            print(f"rank {rank}: {verdict.message}")
        assert me.all_reduce(common_pb2.MAX, [float(rank)]) == [size - 1], "the group goes on"
        me.leave()
        print(f"rank {rank}: done")


if __name__ == "__main__":
    main()
