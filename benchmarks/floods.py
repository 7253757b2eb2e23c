"""`python -m benchmarks.floods`: whether a malicious client makes a worker slower for the others.

Two ranks on one worker sum four bytes again and again. Windows of some seconds alternate: beside a process that is busy
and does not talk to the worker, beside one that floods it, beside one that opens ten thousand connections, and beside
one that never reads its messages. Each has gone on for a while before its window begins. A sum belongs to the window in
which it began.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

import collectived as cd
from benchmarks import conditions
from benchmarks.environments import ROOT
from benchmarks.page import write
from benchmarks.scrape import Spans, Times, watch
from collectived.testing import LocalJob
from collectived_proto.ipc import messages
from collectived_proto.v1 import common_pb2, status_pb2, worker_pb2, worker_pb2_grpc

ROUNDS = 2
WINDOW_SECONDS = 1.5
SETTLE_SECONDS = 1.5  # the work that a client may have at once is over by then
CONNECTIONS = 10_000
MOST = 1.25  # times as slow as beside a busy process
_AT_ONCE = 64  # calls that one flooder has under way
_SPARE = 64  # descriptors that an attacker needs for itself
_PROTOCOL = common_pb2.Protocol(lowest=1, highest=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=WINDOW_SECONDS, help="of each window")
    parser.add_argument("--write", action="store_true", help="put the table into docs/internals/performance.md")
    parser.add_argument("--rank", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--attack", nargs=3, metavar=("KIND", "WORKER", "LINKS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments.rank)
    elif arguments.attack:
        kind, worker, links = arguments.attack
        attack(kind, worker, links)
    else:
        text = f"{conditions.shown()}\n\n{table(*measure(arguments.rounds, arguments.seconds))}"
        print(text)
        if arguments.write:
            write("floods", text)


def measure(rounds: int, seconds: float) -> tuple[Times, dict[str, Spans]]:
    """The times of all sums, and the windows of each kind."""
    windows: dict[str, Spans] = {kind: [] for kind in ATTACKS}
    with cd.testing.local(workers=1) as job, tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        pair = [_started(stack, job.environment(number, 2), "--rank", name) for number in range(2)]
        assert all(_said(one) == "measuring" for one in pair)
        for _, kind in itertools.product(range(rounds), ATTACKS):
            attacker = _started(stack, {}, "--attack", kind, job.workers[0], _links(job))
            assert _said(attacker) == "going"
            time.sleep(SETTLE_SECONDS)
            begin = time.monotonic()
            time.sleep(seconds)
            windows[kind].append((begin, time.monotonic()))
            assert attacker.poll() is None, f"{kind} has ended by itself"
            attacker.kill()
            attacker.wait()
        (folder / "over").touch()
        assert [one.wait() for one in pair] == [0, 0]
        found = np.load(folder / "times.npy")
    return Times(found[0], found[1]), windows


def _started(stack: contextlib.ExitStack, environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    started = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.floods", *words],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    stack.enter_context(started)
    stack.callback(started.kill)
    return started


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def _links(job: LocalJob) -> str:
    with grpc.insecure_channel(job.workers[0]) as channel:
        reply = worker_pb2_grpc.WorkerStub(channel).Status(status_pb2.StatusRequest(local_only=True), timeout=10)
    return str(reply.workers[0].link_address)


def rank(folder: Path) -> None:
    """One of the pair; the times of rank 0 are those that count."""
    began: list[float] = []
    took: list[float] = []
    over = threading.Event()
    with cd.connect() as session, session.join() as group:
        array = session.empty((1,), np.float32)
        array[:] = 1
        for _ in range(1000):
            group.all_reduce("sum", array)
        if group.rank == 0:
            threading.Thread(target=watch, args=(folder / "over", over), daemon=True).start()
        print("measuring", flush=True)
        while True:
            array[0] = 1000.0 if over.is_set() else 1.0
            begin = time.monotonic()
            total = group.all_reduce("sum", array)[0]
            took.append(time.monotonic() - begin)
            began.append(begin)
            if total >= 1000:
                break
        if group.rank == 0:
            np.save(folder / "times.npy", np.array([began, took]))


# Malicious clients


def attack(kind: str, worker: str, links: str) -> None:
    """Does it until this process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ATTACKS[kind](worker, links)


def going() -> None:
    print("going", flush=True)


def busy(worker: str, links: str) -> None:
    """Does not talk to the worker at all."""
    going()
    while True:
        pass


def flood(worker: str, links: str, call: Callable[[Any], Any]) -> None:
    """Calls, so many at the same time, each as soon as one has ended."""
    with grpc.insecure_channel(worker) as channel:
        free = threading.Semaphore(_AT_ONCE)
        stub = worker_pb2_grpc.WorkerStub(channel)
        going()
        while True:
            free.acquire()
            call(stub).add_done_callback(lambda _: free.release())


def status(stub: Any) -> Any:
    return stub.Status.future(status_pb2.StatusRequest(local_only=True))


def prepare(stub: Any) -> Any:
    return stub.Prepare.future(worker_pb2.PrepareRequest(session=b"of nobody", key=1))


def sessions(worker: str, links: str) -> None:
    """Opens sessions, and keeps as many as it is given."""
    with grpc.insecure_channel(worker) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        kept = []
        going()
        while True:
            life = stub.OpenSession(worker_pb2.OpenSessionRequest(protocol=_PROTOCOL, pid=os.getpid(), job="ill"))
            with contextlib.suppress(grpc.RpcError):
                next(life)
                kept.append(life)


@contextlib.contextmanager
def open_doorbell(worker: str, name: str) -> Iterator[tuple[socket.socket, int]]:
    """A doorbell of a group of one rank, and its generation."""
    with grpc.insecure_channel(worker, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        life = stub.OpenSession(
            worker_pb2.OpenSessionRequest(protocol=_PROTOCOL, pid=os.getpid(), job="ill", local=True)
        )
        opened = next(life).opened
        with _entered(opened.door, opened.token):
            *_, last = stub.Join(
                worker_pb2.JoinRequest(session=opened.session, name=name, min_size=1, max_size=1, rank=0), timeout=60
            )
            with _entered(last.joined.door, last.joined.token) as doorbell:
                yield doorbell, last.joined.group.generation
        life.cancel()


def _entered(door: str, token: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(door)
    connection.send(messages.encode_hello(token))
    return connection


def pings(worker: str, links: str) -> None:
    """Asks on its doorbell whether the group loop lives, and reads no answer before it has asked often."""
    ping = messages.encode_bare(messages.MessageType.PING)
    with open_doorbell(worker, "pings") as (doorbell, _):
        going()
        while True:
            with contextlib.suppress(BlockingIOError):
                for _ in range(100):
                    doorbell.send(ping)
                while True:
                    doorbell.recv(256, socket.MSG_DONTWAIT)


def errors(worker: str, links: str) -> None:
    """Rings what was never prepared, is shown out, and comes again."""
    going()
    for number in itertools.count():
        with open_doorbell(worker, f"errors-{number}") as (doorbell, generation):
            doorbell.send(messages.Submit(generation, 1, 0, 0.0, False, ()).encode())
            while doorbell.recv(messages.MAX_MESSAGE):
                pass


def never_reads(worker: str, links: str) -> None:
    """Submits without end and never reads what comes of it; shown out, it comes again."""
    going()
    for number in itertools.count():
        with open_doorbell(worker, f"never-{number}") as (doorbell, _), contextlib.suppress(BrokenPipeError):
            while True:
                doorbell.send(messages.encode_bare(messages.MessageType.PING))


def connections(worker: str, links: str) -> None:
    """Has as many as it can, at the door of clients, at the port for links and at that of gRPC, and says nothing."""
    host, _, port = links.rpartition(":")
    door = worker.removeprefix("unix:").replace("worker-", "door-")
    most = min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE)
    places: tuple[tuple[int, int, Any], ...] = (
        (socket.AF_INET, socket.SOCK_STREAM, (host, int(port))),
        (socket.AF_UNIX, socket.SOCK_SEQPACKET, door),
        (socket.AF_UNIX, socket.SOCK_STREAM, worker.removeprefix("unix:")),
    )
    held: deque[socket.socket] = deque()
    for number in itertools.count():
        if number == most // 10:
            going()
        family, kind, address = places[number % len(places)]
        if len(held) >= most:
            held.popleft().close()
        connection = socket.socket(family, kind)
        connection.settimeout(0.01)
        with contextlib.suppress(OSError):
            connection.connect(address)
        held.append(connection)


ATTACKS: dict[str, Callable[[str, str], None]] = {
    "busy": busy,
    "status": lambda worker, links: flood(worker, links, status),
    "prepare": lambda worker, links: flood(worker, links, prepare),
    "sessions": sessions,
    "pings": pings,
    "errors": errors,
    "connections": connections,
    "never_reads": never_reads,
}
SHOWN = {
    "busy": "a process that is busy and does not talk to the worker",
    "status": "one that asks for the status, 64 times at once",
    "prepare": "one that describes collectives of no group, 64 at once",
    "sessions": "one that opens sessions and keeps them",
    "pings": "one that pings on its doorbell",
    "errors": "one that rings nonsense, is shown out, and comes again",
    "connections": f"one that opens {CONNECTIONS:,} connections and says nothing",
    "never_reads": "one that never reads its doorbell",
}


def table(times: Times, windows: dict[str, Spans]) -> str:
    """The table that is shown. Pure."""
    found: dict[str, NDArray[np.float64]] = {kind: times.within(spans) for kind, spans in windows.items()}
    alone = float(np.median(found["busy"]))
    lines = [
        "| 4 bytes, 2 clients, beside | sums | median | 99 % | times as slow | goal |",
        "|---|---|---|---|---|---|",
    ]
    for kind, took in found.items():
        ratio = float(np.median(took)) / alone
        reached = "" if kind == "busy" else f"≤ {MOST}{'' if ratio <= MOST else ', **missed**'}"
        median, latest = np.median(took) * 1e6, np.percentile(took, 99) * 1e6
        lines.append(f"| {SHOWN[kind]} | {len(took):,} | {median:.0f} µs | {latest:.0f} µs | {ratio:.2f} | {reached} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
