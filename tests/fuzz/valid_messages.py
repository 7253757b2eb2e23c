"""Messages that are valid and extreme: every field filled at random as its descriptor says, mostly at its limits."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from collectived.testing import LocalJob
from collectived_proto.v1 import common_pb2, coordinator_pb2, status_pb2, trace_pb2, worker_pb2, worker_pb2_grpc
from collectived_runtime.heap import TRIM_DELAY_SECONDS

M = TypeVar("M", bound=Message)

_MOST_DEPTH = 6
_MANY = 2000  # entries of a repeated field, rarely
_TEXTS = ("", "a", "a/b", "/a", "\0", "a\nb\x1b[31m", "%s{}\\", "\u202e\U0001f4a3", "é" * 200, "x" * 20_000)
_BRIEF_TEXTS = _TEXTS[:-2]
_INTEGERS = (0, 1, 2, 3, 5, 64, 4096, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, (1 << 62) - 1, 1 << 62, (1 << 63) - 1)
_FLOATS = (0.0, -0.0, 1.0, 1e-300, 1e300, -1.0, float("inf"), float("-inf"), float("nan"), 5e-324)
_UNSIGNED = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
_NARROW = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_INT32)
_STAY = 100  # messages of one guest
_STAYS_SECONDS = 0.05  # for a call that may rightly wait
_PATIENCE = 20.0  # seconds for any other
_SETTLE_SECONDS = 20.0  # for memory to be given back
_PROTOCOL = common_pb2.Protocol(lowest=1, highest=1)
_OPENING = worker_pb2.OpenSessionRequest(protocol=_PROTOCOL, host="h", pid=7, job="fuzz")
_WORKER_REQUESTS: dict[str, type[Any]] = {
    "OpenSession": worker_pb2.OpenSessionRequest,
    "Join": worker_pb2.JoinRequest,
    "Prepare": worker_pb2.PrepareRequest,
    "Submit": worker_pb2.SubmitRequest,
    "Abort": worker_pb2.AbortRequest,
    "Leave": worker_pb2.LeaveRequest,
    "TellStack": worker_pb2.StackRequest,
    "Status": status_pb2.StatusRequest,
    "Trace": trace_pb2.TraceRequest,
}


def fill(message: M, rng: random.Random, known: Mapping[str, Any], depth: int = 0, among_many: bool = False) -> M:
    """The message, with about two thirds of its fields set.

    What is one of many is brief, so that no message grows to gigabytes.

    Args:
        known: values that are true, by the name of the field: nine times out of ten such a field has it, so that the
            message gets beyond the first question.
    """
    for field in message.DESCRIPTOR.fields:
        if field.name in known and rng.random() < 0.9:
            setattr(message, field.name, known[field.name])
        elif rng.random() < 0.65 and depth < _MOST_DEPTH:
            _fill_field(message, field, rng, known, depth, among_many)
    return message


def _fill_field(
    message: Message, field: Any, rng: random.Random, known: Mapping[str, Any], depth: int, among_many: bool
) -> None:
    held = getattr(message, field.name)
    is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    if not field.is_repeated:
        if is_message:
            fill(held, rng, known, depth + 1, among_many).SetInParent()
        else:
            setattr(message, field.name, _scalar(field, rng, among_many))
        return
    are_many = not among_many and depth < 2 and rng.random() < 0.02
    for _ in range(_MANY if are_many else rng.choice((1, 1, 1, 2, 3, 8))):
        if is_message:
            fill(held.add(), rng, known, depth + 1, among_many or are_many)
        else:
            held.append(_scalar(field, rng, among_many or are_many))


def _scalar(field: Any, rng: random.Random, is_brief: bool) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = rng.choice(_BRIEF_TEXTS if is_brief else _TEXTS)
            return rng.randbytes(len(text)) if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice(_FLOATS)
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((*field.enum_type.values_by_number, (1 << 31) - 1))
    bits = 32 if field.cpp_type in _NARROW else 64
    if field.cpp_type in _UNSIGNED:
        return rng.choice((*_INTEGERS, (1 << 64) - 1)) % (1 << bits)
    number = rng.choice(_INTEGERS) % (1 << bits - 1)
    return number if rng.random() < 0.8 else -number - 1


class Guests:
    """Clients of the first worker, and workers of the coordinator, that send such messages; each stays for a while.

    `answers` counts what came of them. gRPC's UNKNOWN and INTERNAL are what an exception becomes that nobody expected.
    """

    def __init__(self, job: LocalJob) -> None:
        self._worker = job.workers[0]
        self._coordinator = f"unix:{Path(job.workers[0].removeprefix('unix:')).with_name('c.sock')}"
        self.answers: Counter[str] = Counter()

    def call_all(self, count: int, seed: int, visit: int = 0) -> None:
        """That many messages to each of the two; the same ones at every visit, of guests with other names."""
        self.call_worker(count, seed, visit)
        self.call_coordinator(count, seed, visit)

    def call_worker(self, count: int, seed: int, visit: int = 0) -> None:
        """That many calls of a worker, by guests that make `_STAY` of them each and leave no goodbye."""
        rng = random.Random(seed)
        for guest in range(-(-count // _STAY)):
            with _channel(self._worker) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                life = stub.OpenSession(_OPENING)  # its end is the session's end
                known = _join(stub, next(life).opened.session, f"fuzz-{seed}-{visit}-{guest}")
                for _ in range(min(_STAY, count - guest * _STAY)):
                    method = rng.choice(tuple(_WORKER_REQUESTS))
                    # It must stay for the calls that follow: another session leaves and aborts.
                    truth = {**known, "session": b"another"} if method in ("Abort", "Leave") else known
                    messages = [fill(_WORKER_REQUESTS[method](), rng, truth) for _ in range(3)]
                    if method == "Submit":
                        fill(messages[0].header, rng, truth)
                    self._call(channel, f"Worker/{method}", messages[: 3 if method == "Submit" else 1])

    def call_coordinator(self, count: int, seed: int, visit: int = 0) -> None:
        """That many messages to the coordinator, of workers that nobody knows, and of hosts that want a number."""
        rng = random.Random(seed)
        with _channel(self._coordinator) as channel:
            for number in range(-(-count // _STAY)):
                hello = fill(coordinator_pb2.Hello(), rng, {})
                hello.task, hello.incarnation = 1000 * (1 + visit) + number, f"fuzz-{seed}-{visit}"
                hello.protocol.CopyFrom(_PROTOCOL)
                told = [fill(coordinator_pb2.WorkerMessage(), rng, {}) for _ in range(_STAY - 2)]
                self._call(channel, "Coordinator/Attach", [coordinator_pb2.WorkerMessage(hello=hello), *told])
                self._call(channel, "Coordinator/Enlist", [fill(coordinator_pb2.EnlistRequest(), rng, {})])
                self._call(channel, "Coordinator/Status", [fill(status_pb2.StatusRequest(), rng, {})])

    def _call(self, channel: grpc.Channel, method: str, messages: list[Any]) -> None:
        waits = method.endswith(("/Join", "/OpenSession", "/Attach"))
        call: Any = channel.stream_stream(f"/collectived.v1.{method}", lambda message: message.SerializeToString())
        try:
            for _ in call(iter(messages), timeout=_STAYS_SECONDS if waits else _PATIENCE):
                pass
            self.answers["OK"] += 1
        except grpc.RpcError as error:
            code = error.code().name
            self.answers[code] += 1
            assert code not in ("UNKNOWN", "INTERNAL"), f"{method} answers {code} ({error.details()}) to {messages!r}"


def _channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])


def _join(stub: Any, session: bytes, name: str) -> dict[str, Any]:
    """Makes the session rank 0 of a group of its own; what messages must say to be about these."""
    joining = worker_pb2.JoinRequest(session=session, name=name, min_size=1, max_size=1, rank=0)
    *_, last = stub.Join(joining, timeout=_PATIENCE)
    group = last.joined.group
    return {"session": session, "key": group.key, "generation": group.generation, "rank": 0, "structure": "[*]"}


class MemoryWatch:
    """What the first worker and the coordinator keep of memory that they share with nobody."""

    def __init__(self, job: LocalJob) -> None:
        with _channel(job.workers[0]) as channel:
            reply = worker_pb2_grpc.WorkerStub(channel).Status(status_pb2.StatusRequest(), timeout=_PATIENCE)
        worker = next(one for one in reply.workers if one.task == 0)
        self._pids = {"worker": worker.pid, "coordinator": reply.coordinator.pid}
        self._before: dict[str, int] = {}

    def begin(self) -> None:
        """Growth is counted from here on, when all that can be given back has been."""
        time.sleep(2 * TRIM_DELAY_SECONDS)
        self._before = {name: _private_bytes(pid) for name, pid in self._pids.items()}

    def growth(self, most: int) -> dict[str, int]:
        """Bytes that each has kept, after waiting for it to be no more than `most`."""
        end = time.monotonic() + _SETTLE_SECONDS
        while True:
            grown = {name: _private_bytes(pid) - self._before[name] for name, pid in self._pids.items()}
            if max(grown.values()) <= most or time.monotonic() > end:
                return grown
            time.sleep(0.5)


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty:"))
