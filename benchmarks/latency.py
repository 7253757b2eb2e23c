"""`python -m benchmarks.latency`: the cost of a sum of four bytes that a loop of calls does not show.

Ranks of one worker sum one float32 of ordinary arrays: after many fresh starts, with uneven work between the calls,
beside a busy thread, and while all wait for one that comes late. Open MPI takes turns with it in the first two.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import conditions
from benchmarks.environments import ENVIRONMENTS, OWN, ROOT
from benchmarks.page import write
from benchmarks.verdicts import Line, number, table

STARTS = 20
CALLS = 20_000
SLOW = 3  # a start is slow that takes more than so many times the median of the starts
OURS, MPI = "collectived", "Open MPI"
_WARM = 200  # calls before those that count
_ROUNDS = 20  # in each of them one rank comes late
_AGAIN = 3  # starts with uneven arrival, and beside a busy thread

Times = NDArray[np.float64]
Found = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=STARTS)
    parser.add_argument("--calls", type=int, default=CALLS, help="after each fresh start")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/internals/performance.md")
    parser.add_argument("--rank", choices=sorted(STRETCHES), help=argparse.SUPPRESS)
    parser.add_argument("--library", choices=("ours", "mpi"), default="ours", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments.rank, arguments.library, arguments.calls)
    else:
        text = f"{conditions.shown()}\n\n{measure(arguments.starts, arguments.calls)}"
        print(text)
        if arguments.write:
            write("latency", text)


def measure(starts: int, calls: int) -> str:
    peer = ENVIRONMENTS["openmpi"].found()
    if peer is None:
        print("Open MPI is skipped: it is not installed (make bench does that)", file=sys.stderr, flush=True)
    libraries = {OURS: OWN, MPI: peer} if peer else {OURS: OWN}
    fresh = in_turns("fresh", starts, calls, libraries)
    busy = in_turns("busy", _AGAIN, calls // 4, {OURS: OWN})[OURS]
    late = {ranks: launch(OWN, "late", _ROUNDS, ranks) for ranks in (2, 4)}
    return f"{table(lines(fresh, busy, late))}\n\n{absolute(in_turns('uneven', _AGAIN, calls // 5, libraries))}"


def in_turns(stretch: str, starts: int, calls: int, libraries: Mapping[str, Path]) -> dict[str, list[Found]]:
    turns = [{name: launch(folder, stretch, calls) for name, folder in libraries.items()} for _ in range(starts)]
    return {name: [turn[name] for turn in turns] for name in libraries}


def launch(folder: Path, stretch: str, calls: int, ranks: int = 2) -> Found:
    """Start ranks of the library in that environment. Return the result of rank 0."""
    if folder == OWN:
        command = [str(folder / "bin" / "collectived"), "launch", "--workers", "1", "--clients", str(ranks), "--"]
    else:
        command = [str(folder / "bin" / "mpiexec"), "-n", str(ranks), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    command += [str(folder / "bin" / "python"), "-m", "benchmarks.latency", "--rank", stretch, "--calls", str(calls)]
    command += ["--library", "ours" if folder == OWN else "mpi"]
    variables = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=variables, check=True)
    return dict(json.loads(ended.stdout.partition("found ")[2].splitlines()[0]))


def slowest(rows: Times) -> Found:
    """Median and 99th percentile, each of the row in which it is largest. A row per rank, a column per call. Pure."""
    return {"median": float(np.median(rows, axis=1).max()), "p99": float(np.quantile(rows, 0.99, axis=1).max())}


def from_last_arrival(begins: Times, ends: Times) -> Times:
    """Of each call, the seconds from its last begin to its last end: one row for all ranks. Pure."""
    return np.asarray(ends.max(axis=0) - begins.max(axis=0))[None]


def processor_seconds(stat: str, ticks: int) -> float:
    """User and system time of a process, from its /proc/PID/stat. Pure."""
    user, system = stat.rpartition(")")[2].split()[11:13]  # the name before may hold anything
    return (int(user) + int(system)) / ticks


def lines(fresh: Mapping[str, Sequence[Found]], busy: Sequence[Found], late: Mapping[int, Found]) -> list[Line]:
    """The figures that are compared with the goals. Pure."""
    medians = {name: [one["median"] for one in found] for name, found in fresh.items()}
    middle = {name: statistics.median(seconds) for name, seconds in medians.items()}
    note = {name: f"median {_micro(middle[name])}, worst {_micro(max(medians[name]))}" for name in fresh}
    what = f"of {len(fresh[OURS])} fresh starts, those slower than {SLOW} × their median"
    found = [Line(what, sum(one > SLOW * middle[OURS] for one in medians[OURS]), "≤", 1, note=note[OURS])]
    if MPI in fresh:
        found.append(Line(f"{MPI} / ours, medians of the starts", middle[MPI] / middle[OURS], "≥", 1, note=note[MPI]))
    worst = max(busy, key=lambda one: one["p99"])
    said = f"worst of {len(busy)} starts; median {_micro(worst['median'])}"
    found.append(Line("beside a busy thread, 99th percentile", worst["p99"] * 1e3, "≤", 1, "ms", said))
    for ranks, used in late.items():
        what = f"processor time while {ranks} ranks wait 400 ms for one of them"
        both, said = used["clients"] + used["worker"], f"{used['worker'] * 1e3:.1f} ms of it the worker's"
        found.append(Line(what, both * 1e3, "≤", 5, "ms", said))
    return found


def absolute(arrivals: Mapping[str, Sequence[Found]]) -> str:
    """Markdown: what has no goal, medians of the starts. Pure."""
    rows = ["| uneven arrival: from the last arrival | median | 99th percentile |", "|---|---:|---:|"]
    for name, found in arrivals.items():
        median, p99 = (statistics.median(one[figure] for one in found) for figure in ("median", "p99"))
        rows.append(f"| {name} | {_micro(median)} | {_micro(p99)} |")
    return "\n".join(rows)


def _micro(seconds: float) -> str:
    return f"{number(seconds * 1e6)} µs"


@dataclass(frozen=True, slots=True)
class Rank:
    """`call` sums what the ranks hold, rank 0 a 1, rank 1 a 2, into `result`; `gather` makes rows of one from each."""

    rank: int
    size: int
    call: Callable[[], object]
    result: NDArray[np.float32]
    gather: Callable[[Times], Times]

    def check(self) -> None:
        """The last sum is right. It is spoiled here, so that the next one has to be written."""
        assert self.result[0] == self.size * (self.size + 1) / 2, self.result
        self.result[0] = np.nan


def rank(stretch: str, library: str, calls: int) -> None:
    with contextlib.ExitStack() as stack:
        value, result = np.empty(1, np.float32), np.empty(1, np.float32)
        if library == "mpi":
            group: Any = importlib.import_module("mpi4py.MPI").COMM_WORLD
            call, gather = partial(group.Allreduce, value, result), group.allgather
        else:
            cd = importlib.import_module("collectived")
            group = stack.enter_context(stack.enter_context(cd.connect()).join())
            call, gather = partial(group.all_reduce, "sum", value, out=result), group.all_gather
        value[0] = group.rank + 1
        me = Rank(group.rank, group.size, call, result, lambda row: np.reshape(gather(row), (group.size, -1)))
        fresh(me, _WARM)
        found = STRETCHES[stretch](me, calls)
        if me.rank == 0:
            print("found", json.dumps(found), flush=True)


def fresh(me: Rank, calls: int) -> Found:
    clock, call, times = time.perf_counter, me.call, np.zeros(calls)
    for turn in range(calls):
        begin = clock()
        call()
        times[turn] = clock() - begin
    me.check()
    return slowest(me.gather(times))


def busy(me: Rank, calls: int) -> Found:
    """Rank 0 has a thread that gives the interpreter up only when it has to."""
    if me.rank == 0:
        threading.Thread(target=exec, args=("while True: pass",), daemon=True).start()
    return fresh(me, calls)


def uneven(me: Rank, calls: int) -> Found:
    """Each rank works before each call, one longer than the other."""
    clock, lengths = time.perf_counter, random.Random(me.rank)  # all processes of a host share this clock
    begins, ends = np.zeros(calls), np.zeros(calls)
    for turn in range(calls):
        until = clock() + lengths.uniform(100e-6, 300e-6)
        while clock() < until:
            pass
        begin = clock()
        me.call()
        ends[turn], begins[turn] = clock(), begin
        me.check()
    return slowest(from_last_arrival(me.gather(begins), me.gather(ends)))


def late(me: Rank, rounds: int) -> Found:
    """Processor time of all clients and of the worker in a round in which rank 1 comes late."""
    import grpc  # not there where Open MPI is

    from collectived_proto.v1 import status_pb2, worker_pb2_grpc

    with grpc.insecure_channel(os.environ["COLLECTIVED_WORKER"]) as channel:
        reply = worker_pb2_grpc.WorkerStub(channel).Status(status_pb2.StatusRequest(local_only=True), timeout=10)
    worker, ticks = Path(f"/proc/{reply.workers[0].pid}/stat"), os.sysconf("SC_CLK_TCK")
    me.gather(np.zeros(1))  # all are here
    before = np.array([time.process_time(), processor_seconds(worker.read_text(), ticks)])
    for _ in range(rounds):
        if me.rank == 1:
            time.sleep(0.4)
        me.call()
        me.check()
    after = np.array([time.process_time(), processor_seconds(worker.read_text(), ticks)])
    used = me.gather((after - before) / rounds)
    return {"clients": float(used[:, 0].sum()), "worker": float(used[0, 1])}


STRETCHES = {"fresh": fresh, "uneven": uneven, "busy": busy, "late": late}

if __name__ == "__main__":
    main()
