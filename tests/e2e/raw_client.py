"""A client that knows the generated code alone, as tests use it: every request just as it is written down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
import numpy as np
from google.rpc import status_pb2 as google_status

from collectived_proto import codec
from collectived_proto.types import AllReduce, Collective, DType, Leaf, Operation, ReduceOp
from collectived_proto.v1 import common_pb2, status_pb2, worker_pb2, worker_pb2_grpc

SUM = AllReduce(ReduceOp.SUM)
POST = 1 << 62
CHUNK = 1 << 20


def described(operation: Operation, *shapes: tuple[int, ...], is_open: bool = False) -> common_pb2.Collective:
    """A list of float32 arrays."""
    leaves = tuple(Leaf(f"[{index}]", DType.FLOAT32, shape) for index, shape in enumerate(shapes))
    structure = "" if is_open else f"[{', '.join('*' for _ in shapes)}]"
    return codec.collective_to_proto(Collective(operation, structure, leaves, site="raw_client.py:1", open=is_open))


def data(*arrays: Sequence[float]) -> bytes:
    return b"".join(np.asarray(array, np.float32).tobytes() for array in arrays)


class Reply:
    """What came back of a Submit."""

    def __init__(self, replies: Any) -> None:
        self.shapes: dict[int, list[int]] = {}
        self.packs: list[list[int]] = []
        self.total = 0
        self.structure = ""
        received: list[tuple[int, int]] = []
        raw = bytearray()
        for reply in replies:
            if not reply.HasField("result"):
                assert 0 < len(reply.data) <= CHUNK
                raw += reply.data
                continue
            self.packs.append(list(reply.result.indices))
            self.total, self.structure = reply.result.total, reply.result.structure
            for index, leaf in zip(reply.result.indices, reply.result.leaves, strict=True):
                self.shapes[index] = list(leaf.shape)
                received.append((index, int(np.prod(leaf.shape))))
        values = np.frombuffer(bytes(raw), np.float32)
        assert len(values) == sum(count for _, count in received)
        ends = np.cumsum([0, *(count for _, count in received)])
        self.values = {
            index: values[start:stop].reshape(self.shapes[index]).tolist()
            for (index, _), start, stop in zip(received, ends, ends[1:], strict=False)
        }

    @property
    def value(self) -> Any:
        """Of the one array that came."""
        ((_, found),) = self.values.items()
        return found


class Raw:
    """A client that knows the generated code alone. One channel, one session."""

    def __init__(self, address: str, metadata: Sequence[tuple[str, str]] = (), stacks: bool = False) -> None:
        self.channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)
        self.metadata = metadata
        self.life = self.stub.OpenSession(
            worker_pb2.OpenSessionRequest(
                protocol=common_pb2.Protocol(lowest=1, highest=1), host="elsewhere", pid=7, job="raw", stacks=stacks
            ),
            metadata=metadata,
        )
        self.opened = next(self.life).opened
        self.key = self.generation = self.rank = 0

    def join(self, name: str, size: int, rank: int) -> None:
        request = worker_pb2.JoinRequest(
            session=self.opened.session, name=name, min_size=size, max_size=size, rank=rank
        )
        *_, last = self.stub.Join(request, timeout=20, metadata=self.metadata)
        assert not last.joined.door and not last.joined.token
        self.key, self.rank = last.joined.group.key, last.joined.rank
        self.generation = last.joined.group.generation

    def header(self, collective: common_pb2.Collective, **fields: Any) -> worker_pb2.SubmitHeader:
        named = {"session": self.opened.session, "key": self.key, "rank": self.rank, **fields}
        return worker_pb2.SubmitHeader(collective=collective, **named)

    def call(self, *requests: Any) -> Any:
        """A Submit with these requests: headers, and bytes that are data."""
        return self.stub.Submit(
            iter(
                worker_pb2.SubmitRequest(data=request)
                if isinstance(request, bytes)
                else worker_pb2.SubmitRequest(header=request)
                if isinstance(request, worker_pb2.SubmitHeader)
                else request
                for request in requests
            ),
            timeout=30,
            metadata=self.metadata,
        )

    def submit(self, collective: common_pb2.Collective, *chunks: bytes, **fields: Any) -> Reply:
        return Reply(self.call(self.header(collective, **fields), *chunks))

    def cancel(self, instance: int) -> None:
        request = worker_pb2.CancelRequest(session=self.opened.session, key=self.key, rank=self.rank, instance=instance)
        self.stub.Cancel(request, timeout=10, metadata=self.metadata)

    def abort(self, reason: str) -> None:
        self.stub.Abort(
            worker_pb2.AbortRequest(session=self.opened.session, key=self.key, rank=self.rank, reason=reason),
            timeout=10,
        )

    def tell_stack(self, text: str) -> None:
        self.stub.TellStack(worker_pb2.StackRequest(session=self.opened.session, stack=text), timeout=10)

    def leave(self) -> worker_pb2.LeaveReply:
        reply: worker_pb2.LeaveReply = self.stub.Leave(
            worker_pb2.LeaveRequest(session=self.opened.session, key=self.key, rank=self.rank), timeout=10
        )
        return reply

    def close(self) -> None:
        self.life.cancel()
        self.channel.close()

    def in_flight(self) -> bool:
        """Whether anything of its group is under way on its worker."""
        return any(group_loop.in_flight for group_loop in self.status().lanes if group_loop.key == self.key)

    def status(self) -> status_pb2.WorkerStatus:
        """What its worker tells of itself."""
        (found,) = self.stub.Status(status_pb2.StatusRequest(local_only=True), timeout=10).workers
        worker: status_pb2.WorkerStatus = found
        return worker


def each(one: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """What `one` returns for each item, all at the same time; or the error of an RPC that it raised."""
    given = list(items)
    found: list[Any] = [None] * len(given)

    def run(index: int) -> None:
        try:
            found[index] = one(given[index])
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    for value in found:
        if isinstance(value, Exception) and not isinstance(value, grpc.RpcError):
            raise value
    return found


def failure(call: Callable[[], Any]) -> tuple[str, str, common_pb2.Verdict | None]:
    """Code, message and verdict of a call that must fail."""
    try:
        found = call()
    except grpc.RpcError as error:
        return told(error)
    raise AssertionError(f"nothing was raised, but there was {found}")


def told(error: Any) -> tuple[str, str, common_pb2.Verdict | None]:
    """The same of an error."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in google_status.Status.FromString(value).details:
                verdict = common_pb2.Verdict()
                if detail.Unpack(verdict):
                    return error.code().name, error.details(), verdict
    return error.code().name, error.details(), None
