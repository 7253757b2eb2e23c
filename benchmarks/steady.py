"""`python -m benchmarks.steady`: whether a worker stays as it was, over 100,000 collectives and beside other work.

Four ranks on one worker. Two of them sum four bytes again and again; memory and time at the start are compared with
those at the end. Then the other two sum 16 MiB without pause, another process asks the worker for its status 50 times a
second, and the small sums are timed again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import collectived as cd
from benchmarks import conditions
from benchmarks.environments import ROOT
from benchmarks.page import write
from benchmarks.verdicts import Line, table
from collectived_proto.v1 import status_pb2, worker_pb2_grpc

ROUNDS = 100_000
STATUS_PER_SECOND = 50
LARGE = 16 << 20
_EDGE = 5_000  # calls at the start, and at the end, whose times are compared
_FILL = 9_000  # calls before: then the flight recorder of the worker is full, and replaces what it holds
_PROBE = 3_000  # calls whose median is one figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", action="store_true", help="put the table into docs/internals/performance.md")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ask", metavar="WORKER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        ask(arguments.ask)
    elif arguments.rank:
        rank(arguments.rounds)
    else:
        found = launch(arguments.rounds)
        text = f"{conditions.shown()}\n\n{table(lines(found, arguments.rounds))}"
        print(text)
        if arguments.write:
            write("steady", text)


def launch(rounds: int) -> dict[str, float]:
    """Start a job of four ranks on one worker. Return the figures of rank 0."""
    command = [str(Path(sys.executable).with_name("collectived")), "launch", "--workers", "1", "--clients", "4", "--"]
    command += [sys.executable, "-m", "benchmarks.steady", "--rank", "--rounds", str(rounds)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    line = next(line for line in ended.stdout.splitlines() if "found " in line)
    figures: dict[str, float] = json.loads(line.partition("found ")[2])
    return figures


def lines(found: dict[str, float], rounds: int) -> list[Line]:
    """The figures that are compared with the goals. Pure."""
    what = f"{rounds:,} sums of 4 bytes"
    return [
        Line(f"{what}: median at the end / at the start", found["last"] / found["first"], "≤", 1.15),
        Line(f"{what}: growth of the worker", found["worker_growth"], "≤", 1.0, "MiB", "without shared memory"),
        Line(f"{what}: growth of its shared memory", found["shared_growth"], "≤", 0.0, "MiB"),
        Line(f"{what}: growth of a client", found["client_growth"], "≤", 1.0, "MiB"),
        Line("the worker beyond its shared memory", found["worker"], "<", 150.0, "MiB"),
        Line(
            f"4 bytes beside {STATUS_PER_SECOND} status calls a second and 16 MiB without pause / alone",
            found["beside"] / found["alone"],
            "≤",
            2.0,
            note=f"{found['beside'] * 1e6:.0f} µs against {found['alone'] * 1e6:.0f} µs",
        ),
    ]


def rank(rounds: int) -> None:
    """One of the four: two are small, two are large."""
    with cd.connect() as session, session.join(idle=True) as world:
        small = world.rank < 2
        with session.join("small" if small else "large", 2) as group:
            array = session.empty((1,) if small else (LARGE // 4,), np.float32)
            array[:] = 1
            if small:
                found = long_run(group, array, rounds)
                found["alone"] = min(median(group, array) for _ in range(5))
            world.barrier()
            if small:
                found["beside"] = min(median(group, array) for _ in range(5))
                world.barrier()
            else:
                beside(world, group, array)
            if world.rank == 0:
                print("found", json.dumps(found), flush=True)


def long_run(group: cd.Group, array: Any, rounds: int) -> dict[str, float]:
    for _ in range(_FILL):
        result = group.all_reduce("sum", array)
    times = np.zeros(rounds)  # there before, so that they are no growth
    before = memory()
    for number in range(rounds):
        begin = time.perf_counter()
        result = group.all_reduce("sum", array)
        times[number] = time.perf_counter() - begin
    assert result[0] == 2
    after = memory()
    return {
        "first": float(np.median(times[:_EDGE])),
        "last": float(np.median(times[-_EDGE:])),
        "worker": after["worker"],
        "worker_growth": after["worker"] - before["worker"],
        "shared_growth": after["shared"] - before["shared"],
        "client_growth": after["client"] - before["client"],
    }


def beside(world: cd.Group, group: cd.Group, array: Any) -> None:
    """Sums without pause, while the worker is asked for its status, until the small ones are done."""
    asking = None
    if group.rank == 0:
        worker = os.environ["COLLECTIVED_WORKER"]
        asking = subprocess.Popen([sys.executable, "-m", "benchmarks.steady", "--ask", worker])
    over = world.barrier(async_op=True)
    stop = 1000.0
    while True:
        array[0] = stop if over.done() else 1.0
        if group.all_reduce("sum", array)[0] >= stop:  # both see it in the same instance
            break
    over.wait()
    if asking is not None:
        asking.terminate()
        answered = asking.communicate()[0]
        assert asking.returncode == 0, answered


def ask(worker: str) -> None:
    """Asks a worker for its status, so many times a second, until SIGTERM."""
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    with grpc.insecure_channel(worker) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        due = time.monotonic()
        while not stopped:
            stub.Status(status_pb2.StatusRequest(local_only=True), timeout=10)
            due = max(due + 1 / STATUS_PER_SECOND, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))


def memory() -> dict[str, float]:
    """MiB of the worker without and with what it shares, and of this process."""
    with grpc.insecure_channel(os.environ["COLLECTIVED_WORKER"]) as channel:
        reply = worker_pb2_grpc.WorkerStub(channel).Status(status_pb2.StatusRequest(local_only=True), timeout=10)
    worker, client = resident(reply.workers[0].pid), resident(os.getpid())
    return {"worker": worker["own"], "shared": worker["shared"], "client": client["own"]}


def resident(pid: int) -> dict[str, float]:
    """Resident MiB of a process: its own, and of shared memory."""
    kib = {
        line.split(":")[0]: int(line.split()[1])
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("Rss")
    }
    return {"own": (kib["RssAnon"] + kib["RssFile"]) / 1024, "shared": kib["RssShmem"] / 1024}


def median(group: cd.Group, array: Any) -> float:
    """Of some calls in a row, in seconds."""
    times = []
    for _ in range(_PROBE):
        begin = time.perf_counter()
        group.all_reduce("sum", array)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


if __name__ == "__main__":
    main()
