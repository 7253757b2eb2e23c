"""A living worker besieged: strangers and a client of its own send what nobody should, while a good job goes on.

A siege counts what was sent and how it was answered, and fails where a daemon ends, where an answer is that of a defect
(gRPC's UNKNOWN, which an exception becomes that nobody expected), or where the good job notices anything.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tests.e2e.raw_client import SUM, data, described
from tests.fuzz.mutations import inputs

import collectived as cd
from collectived.testing import LocalJob
from collectived_proto.ipc import messages
from collectived_proto.v1 import common_pb2, status_pb2, worker_pb2, worker_pb2_grpc
from collectived_runtime.transport import hello

_SERVICE = "/collectived.v1.Worker/"
_PATIENCE = 10.0  # seconds for what must be answered
_FOR_MEMORY = 60.0  # seconds for what is answered behind an arena of gigabytes, which the kernel fills with zeros
_WAITS = 0.05  # seconds for a call that may rightly wait: a join, for others


class GoodJob:
    """Two ranks on two workers that sum again and again, and check every sum.

    `pause`: seconds between two sums.
    """

    def __init__(self, job: LocalJob, pause: float = 0.0) -> None:
        self._job = job
        self._pause = pause
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self.sums = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> GoodJob:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            self._job.run(self._rank, ranks=2)
        except BaseException as error:
            self._failed = error

    def _rank(self, group: cd.Group) -> None:
        mine = np.arange(1000, dtype=np.float32) + group.rank
        going_on = True
        while going_on:
            assert (group.all_reduce("sum", mine) == 2 * np.arange(1000) + 1).all()
            going_on = group.broadcast(not self._stop.wait(self._pause))
            self.sums += 1


class Attacker:
    """A client of the first worker, admitted as any process of this user is."""

    def __init__(self, job: LocalJob) -> None:
        self._channel = grpc.insecure_channel(job.workers[0], [("grpc.use_local_subchannel_pool", 1)])
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self.answers: Counter[str] = Counter()
        self._groups = 0

    def close(self) -> None:
        self._channel.close()

    # gRPC

    def call_all(self, count: int, seed: int) -> None:
        """Calls every method of a worker with that many inputs made of good ones."""
        life, opened = self._open(local=False)
        name = self._name()
        (*_, joined) = self._stub.Join(
            worker_pb2.JoinRequest(session=opened.session, name=name, min_size=1, max_size=1, rank=0), timeout=_PATIENCE
        )
        group, session = joined.joined.group, opened.session
        header = worker_pb2.SubmitHeader(
            session=session, key=group.key, rank=0, generation=group.generation, collective=described(SUM, (3,))
        )
        good: dict[str, list[Any]] = {
            "OpenSession": [worker_pb2.OpenSessionRequest(protocol=_PROTOCOL, host="h", pid=7, job="fuzz")],
            "Join": [worker_pb2.JoinRequest(session=session, name=name, min_size=1, max_size=2, rank=0)],
            "Prepare": [
                worker_pb2.PrepareRequest(
                    session=session, key=group.key, rank=0, collective=described(SUM, (3,), (2, 2))
                )
            ],
            "Submit": [worker_pb2.SubmitRequest(header=header), worker_pb2.SubmitRequest(data=data([1, 2, 3]))],
            "Abort": [worker_pb2.AbortRequest(session=b"another" + session, key=group.key, rank=0, reason="NaN")],
            "Leave": [worker_pb2.LeaveRequest(session=b"another" + session, key=group.key, rank=0)],
            "TellStack": [worker_pb2.StackRequest(session=session, stack="data.py:88 in load")],
            "Status": [status_pb2.StatusRequest(local_only=True)],
        }
        for method, requests in good.items():
            seeds = [message.SerializeToString() for message in requests]
            for one in inputs(seeds, max(1, count // len(good)), seed):
                self._call(method, [*seeds[:1], one] if method == "Submit" else [one])
        life.cancel()

    def _call(self, method: str, requests: list[bytes]) -> None:
        waits = method in ("Join", "OpenSession")
        call: Any = self._channel.stream_stream(_SERVICE + method)
        try:
            for _ in call(iter(requests), timeout=_WAITS if waits else _PATIENCE):
                pass
            self.answers["OK"] += 1
        except grpc.RpcError as error:
            code, details = error.code().name, error.details() or ""
            waited = waits and code == "DEADLINE_EXCEEDED"
            self.answers["waited" if waited else code] += 1
            assert waited or code not in ("UNKNOWN", "INTERNAL", "DEADLINE_EXCEEDED"), (
                f"{method} answers {code} ({details}) to {requests!r}"
            )

    # Doorbells and session sockets

    def ring_all(self, count: int, seed: int) -> None:
        """Sends that many messages down a doorbell and a session socket, again and again after the worker hung up."""
        left = count
        while left > 0:
            with self._admitted() as (doorbell, seeds):
                left -= self._sent(doorbell, inputs(seeds, left, seed + left), _PING, messages.MessageType.PONG)
        left = count // 4
        while left > 0:
            life, opened = self._open(local=True)
            with self._entered(opened.door, opened.token) as session:
                session.settimeout(_FOR_MEMORY)
                seeds = [
                    messages.encode_arena(messages.MessageType.ARENA_REQUEST, 0, 1 << 16),
                    messages.encode_arena(messages.MessageType.ARENA_DROP, 1, 0),
                ]
                left -= self._sent(session, inputs(seeds, left, seed + left), _TOO_MUCH, messages.MessageType.REFUSED)
            life.cancel()

    def _sent(
        self, connection: socket.socket, hostile: Iterable[bytes], echo: bytes, answer: messages.MessageType
    ) -> int:
        """How many were read until the worker hung up, or there were no more.

        After each one comes `echo`, whose `answer` tells that the worker has read both.
        """
        sent = 0
        for message in hostile:
            sent += 1
            try:
                connection.send(message or b"\0")
                connection.send(echo)
                while True:
                    heard = connection.recv(messages.MAX_MESSAGE)
                    if not heard:
                        raise BrokenPipeError
                    if heard[0] == answer:
                        break
                self.answers["answered"] += 1
            except (BrokenPipeError, ConnectionResetError):
                self.answers["hung up"] += 1
                break
        return sent

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[tuple[socket.socket, list[bytes]]]:
        """A doorbell of a group of one, and good messages for it."""
        life, opened = self._open(local=True)
        with self._entered(opened.door, opened.token):
            *_, last = self._stub.Join(
                worker_pb2.JoinRequest(session=opened.session, name=self._name(), min_size=1, max_size=1, rank=0),
                timeout=_PATIENCE,
            )
            joined = last.joined
            prepared = self._stub.Prepare(
                worker_pb2.PrepareRequest(
                    session=opened.session, key=joined.group.key, rank=0, collective=described(SUM, (3,))
                ),
                timeout=_PATIENCE,
            )
            generation, number = joined.group.generation, prepared.id
            seeds = [
                messages.Submit(generation, number, 0, 0.0, True, ((0, 0),)).encode(),
                messages.Submit(generation, number, 0, 1.0, False, ((0, 64),), (1, 2), 2.0).encode(),
                messages.encode_release((1, 2, 3)),
                messages.Withdrawal(generation, messages.P2P_BASE).encode(),
                messages.Withdrawal(generation, messages.P2P_BASE, 1).encode(),
                messages.OverdueReceive(generation, messages.P2P_BASE, 99).encode(),
                messages.encode_bare(messages.MessageType.PING),
                messages.encode_bare(messages.MessageType.ABORT, "NaN"),
            ]
            with self._entered(joined.door, joined.token) as doorbell:
                yield doorbell, seeds
        life.cancel()

    def _open(self, local: bool) -> tuple[Any, Any]:
        life = self._stub.OpenSession(
            worker_pb2.OpenSessionRequest(protocol=_PROTOCOL, host="h", pid=os.getpid(), job="fuzz", local=local)
        )
        return life, next(life).opened

    @contextlib.contextmanager
    def _entered(self, door: str, token: bytes) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(door)
            connection.send(messages.encode_hello(token))
            connection.settimeout(_PATIENCE)
            yield connection

    def _name(self) -> str:
        self._groups += 1
        return f"fuzz-{self._groups}"


_PING = messages.encode_bare(messages.MessageType.PING)
_TOO_MUCH = messages.encode_arena(messages.MessageType.ARENA_REQUEST, 0, 1 << 62)
_PROTOCOL = common_pb2.Protocol(lowest=1, highest=1)


def status_of(job: LocalJob) -> status_pb2.WorkerStatus:
    """What the first worker tells of itself."""
    with grpc.insecure_channel(job.workers[0], [("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = status_pb2.StatusRequest(local_only=True)
        reply = worker_pb2_grpc.WorkerStub(channel).Status(request, timeout=_PATIENCE)
    found: status_pb2.WorkerStatus = reply.workers[0]
    return found


def knock(job: LocalJob, count: int, seed: int) -> None:
    """Strangers at the first worker's door and at its port for links, with that many first messages that are none."""
    door = str(Path(job.workers[0].removeprefix("unix:")).with_name("door-0.sock"))
    host, _, port = status_of(job).link_address.rpartition(":")
    link = host, int(port)
    for one in inputs([messages.encode_hello(os.urandom(messages.TOKEN_BYTES))], count, seed):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(door)
            _say(connection, one or b"\0")
    for one in inputs([hello.LinkHello(0, 1, 2, 3, 4, os.urandom(16)).encode()], count, seed):
        with socket.create_connection(link, _PATIENCE) as connection:
            _say(connection, one + os.urandom(hello.PROOF_BYTES))


def _say(connection: socket.socket, words: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send(words)
