"""Daemons get messages that are valid and extreme, by every method of the contract, beside a good job."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from tests.fuzz.contract import calls, draw_examples, list_methods
from tests.fuzz.siege import GoodJob

from collectived.testing import LocalJob
from collectived_proto.v1 import (
    common_pb2,
    coordinator_pb2,
    coordinator_pb2_grpc,
    status_pb2,
    trace_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from collectived_runtime.coordinator.service import TRIM_DELAY_SECONDS as COORDINATOR_DELAY
from collectived_runtime.engine.record.flight_recorder import MAX_ENTRIES
from collectived_runtime.heap import TRIM_DELAY_SECONDS as WORKER_DELAY

_STAY = 100  # calls of one guest
_STAYS_SECONDS = 0.05  # for a call that may rightly wait
_PATIENCE = 20.0  # seconds for any other
_CHANNEL_DEADLINE = "Deadline Exceeded"  # as gRPC says it of a call, and a worker of no collective
_SETTLE_SECONDS = 2 * max(WORKER_DELAY, COORDINATOR_DELAY) + 2.0  # until HeapTrimmers have given free memory back
_PROTOCOL = common_pb2.Protocol(lowest=1, highest=1)
_OPENING = worker_pb2.OpenSessionRequest(protocol=_PROTOCOL, host="h", pid=7, job="fuzz")
_STREAM_OPENINGS = {"Worker/Submit": "header", "Coordinator/Attach": "hello"}
_WAITING = ("Worker/OpenSession", "Worker/Join", "Coordinator/Attach")
_ENDING = ("Worker/Abort", "Worker/Leave", "Worker/Drain", "Coordinator/Drain")
"""What ends a guest's group or a worker. During its stay a guest says them about others that are not there; it says
the truth when it goes, and what may end daemons in order is said last of all."""
_COSTLY = ("Worker/Trace", "Coordinator/Trace")  # a full recorder is told in a third of a second
_NOBODY = {"session": b"another", "group": "another"}


class Guests:
    """Clients of the first worker, and workers of the coordinator, that send such messages; each stays for a while.

    `answers` counts what came of each method, and `messages` what was sent. gRPC's UNKNOWN and INTERNAL are what an
    exception becomes that nobody expected.
    """

    def __init__(self, job: LocalJob) -> None:
        self._addresses = {"Worker": job.workers[0], "Coordinator": _coordinator_of(job)}
        self._methods = list_methods()
        self.answers: Counter[tuple[str, str]] = Counter()
        self.messages: Counter[str] = Counter()

    def call_all(self, count: int, seed: int, visit: int = 0) -> None:
        """At least that many messages to each daemon; the same at every visit, of guests with other names."""
        self.call_worker(count, seed, visit)
        self.call_coordinator(count, seed, visit)

    def call_worker(self, count: int, seed: int, visit: int = 0) -> None:
        """Messages of guests that leave no goodbye."""
        rng = random.Random(seed)
        end = self.messages["Worker"] + count
        while self.messages["Worker"] < end:
            name = f"fuzz-{visit}-{rng.getrandbits(40)}"
            with _channel(self._addresses["Worker"]) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                life = stub.OpenSession(_OPENING)  # its end is the session's end
                known = _join(stub, next(life).opened.session, name)
                self._stay(channel, "Worker", known, {}, rng.getrandbits(60))

    def call_coordinator(self, count: int, seed: int, visit: int = 0) -> None:
        """Messages of workers that nobody knows, and of hosts that want a number."""
        rng = random.Random(seed)
        end, number = self.messages["Coordinator"] + count, 0
        with _channel(self._addresses["Coordinator"]) as channel:
            while self.messages["Coordinator"] < end:
                number += 1
                fixed = {"task": 100_000 * (1 + visit) + number, "incarnation": f"fuzz-{seed}-{visit}"}
                self._stay(channel, "Coordinator", {"protocol": _PROTOCOL}, fixed, rng.getrandbits(60))

    def drain_all(self, count: int, seed: int) -> None:
        """That many drains of whatever the message says, to each daemon that is still there; they may end in order."""
        for service, address in self._addresses.items():
            with _channel(address) as channel:
                self._send(channel, [f"{service}/Drain"], count, seed, {"task": 0}, {})

    def _stay(
        self, channel: grpc.Channel, service: str, known: Mapping[str, Any], fixed: Mapping[str, Any], seed: int
    ) -> None:
        mine = [name for name in self._methods if name.startswith(f"{service}/")]
        ending, costly = ([name for name in mine if name in some] for some in (_ENDING, _COSTLY))
        others = [name for name in mine if name not in (*ending, *costly)]
        self._send(channel, others, _STAY, seed, known, fixed)
        self._send(channel, costly, _STAY // 20, seed + 3, known, fixed)
        self._send(channel, ending, _STAY // 10, seed + 1, known, {**fixed, **_NOBODY})
        truly = {**fixed, "group": known.get("name", "another")}  # a drain without a group would be one of a worker
        self._send(channel, ending, _STAY // 20, seed + 2, known, truly)

    def _send(
        self,
        channel: grpc.Channel,
        methods: list[str],
        count: int,
        seed: int,
        known: Mapping[str, Any],
        fixed: Mapping[str, Any],
    ) -> None:
        for name, messages in draw_examples(calls(methods, known, fixed, _STREAM_OPENINGS), count, seed):
            self.messages[name.partition("/")[0]] += len(messages)
            self._call(channel, name, messages)

    def _call(self, channel: grpc.Channel, name: str, messages: list[Any]) -> None:
        waits = name in _WAITING or is_open_ended(name, messages[0])
        call: Any = channel.stream_stream(f"/collectived.v1.{name}", lambda message: message.SerializeToString())
        try:
            for _ in call(iter(messages), timeout=_STAYS_SECONDS if waits else _PATIENCE):
                pass
            self.answers[name, "OK"] += 1
        except grpc.RpcError as error:
            code = error.code().name
            self.answers[name, code] += 1
            hangs = error.details() == _CHANNEL_DEADLINE and not waits
            assert not hangs and code not in ("UNKNOWN", "INTERNAL"), (
                f"{name} answers {code} ({error.details()}) to {messages!r}"
            )


def is_open_ended(name: str, message: Any) -> bool:
    """Whether a call may rightly wait forever: without a timeout for its turn, or for a message that nobody sends."""
    if name != "Worker/Submit" or message.header.timeout_seconds:
        return False
    asked = message.header.collective.WhichOneof("operation")
    return message.header.HasField("instance") or asked in ("send", "recv")


def _coordinator_of(job: LocalJob) -> str:
    return f"unix:{Path(job.workers[0].removeprefix('unix:')).with_name('c.sock')}"


def _channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


def _join(stub: Any, session: bytes, name: str) -> dict[str, Any]:
    """Makes the session rank 0 of a group of its own; what messages must say to be about these."""
    joining = worker_pb2.JoinRequest(session=session, name=name, min_size=1, max_size=1, rank=0)
    *_, last = stub.Join(joining, timeout=_PATIENCE)
    group = last.joined.group
    known = {"session": session, "key": group.key, "generation": group.generation, "rank": 0, "structure": "[*]"}
    return {**known, "name": name}


class MemoryWatch:
    """What the first worker and the coordinator keep of memory that they share with nobody."""

    def __init__(self, job: LocalJob) -> None:
        self._job = job
        with _channel(_coordinator_of(job)) as channel:
            reply = coordinator_pb2_grpc.CoordinatorStub(channel).Status(status_pb2.StatusRequest(), timeout=_PATIENCE)
        worker = next(one for one in reply.workers if one.task == 0)
        self._pids = {"worker": worker.pid, "coordinator": reply.coordinator.pid}
        self._before: dict[str, int] = {}

    def rehearse(self) -> None:
        """Let honest use take what it needs once: a full flight recorder, and the room in which all of it is told.

        A guest of each daemon goes at its end, so that free memory is given back.
        """
        with _channel(self._job.workers[0]) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            life = stub.OpenSession(_OPENING)
            next(life)
            with GoodJob(self._job):  # what its group remembers of itself is recorded where somebody looks
                while _count_recorded(stub) < MAX_ENTRIES:
                    time.sleep(0.1)
        hello = coordinator_pb2.Hello(protocol=_PROTOCOL, task=99_999, incarnation="rehearsal", host="h")
        with _channel(_coordinator_of(self._job)) as channel:
            attach = coordinator_pb2_grpc.CoordinatorStub(channel).Attach
            for _ in attach(iter([coordinator_pb2.WorkerMessage(hello=hello)]), timeout=_PATIENCE):
                pass
        time.sleep(_SETTLE_SECONDS)

    def begin(self) -> None:
        """Growth is counted from here on."""
        self._before = {name: _private_bytes(pid) for name, pid in self._pids.items()}

    def growth(self, most: int) -> dict[str, int]:
        """Bytes that each has kept, when nothing more is given back or it is no more than `most`."""
        end = time.monotonic() + _SETTLE_SECONDS
        while True:
            grown = {name: _private_bytes(pid) - self._before[name] for name, pid in self._pids.items()}
            if max(grown.values()) <= most or time.monotonic() > end:
                return grown
            time.sleep(0.5)


def _count_recorded(stub: worker_pb2_grpc.WorkerStub) -> int:
    """Collectives of the first worker's recorder; all that workers recorded is told, through the coordinator."""
    told = [reply.worker for reply in stub.Trace(trace_pb2.TraceRequest(), timeout=_PATIENCE)]
    return sum(len(part.collectives) + part.left_out for part in told if part.task == 0)


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty:"))
