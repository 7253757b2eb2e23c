"""`python -m benchmarks.elastic`: how fast a group of many workers forms, loses a rank and forms again.

Every worker is a daemon of its own on this host, and all of them share its processors with the processes of the ranks.
A step lasts from the call of the last rank until all ranks have returned; the processor time of this host meanwhile is
beside it, for on many hosts it is spent side by side. In the second part each worker has many ranks, and connections of
workers are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import multiprocessing.synchronize
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import collectived as cd
from benchmarks import conditions
from benchmarks.paced_hosts import paced_hosts
from benchmarks.page import write
from benchmarks.verdicts import Line, table

WORKERS = 64
RANKS = 256
ROUNDS = 3
GOAL_SECONDS = 0.5
MOST_LINKS = 32  # of a worker to others; the goal
_PROCESSES = 8  # of ranks, which are threads there
_APART_SECONDS = 0.5  # by which the last rank comes later than the others: before workers report that they wait
_PATIENCE = 60.0
_ESTABLISHED = "01"  # in /proc/net/tcp
_TICKS = os.sysconf("SC_CLK_TCK")
STEPS = ("join", "first sum", "leave", "rejoin without it", "join again")

Span = tuple[float, float]  # call and return
_barrier: multiprocessing.synchronize.Barrier


@dataclass(frozen=True, slots=True)
class Steps:
    """By step, seconds of each round, and of processor time; and the most connections between workers that one had."""

    seconds: dict[str, list[float]]
    busy: dict[str, list[float]]
    links: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--ranks", type=int, default=RANKS, help="of the second part")
    parser.add_argument("--write", action="store_true", help="put the table into docs/internals/performance.md")
    arguments = parser.parse_args()
    if arguments.workers < 2:
        parser.error(f"--workers {arguments.workers}: 2 or more are needed, for a group whose last rank leaves")
    if arguments.ranks < 1 or arguments.ranks % arguments.workers:
        parser.error(f"--ranks {arguments.ranks}: expected a multiple of the {arguments.workers} workers")
    with paced_hosts(arguments.workers, None) as addresses:
        alone = measure(addresses, 1, ROUNDS)
        many = measure(addresses, arguments.ranks // arguments.workers, 1)
    text = f"{conditions.shown()}\n\n{table(lines(arguments.workers, arguments.ranks, alone, many))}"
    print(text)
    if arguments.write:
        write("elastic", text)


def lines(workers: int, ranks: int, alone: Steps, many: Steps) -> list[Line]:
    """The figures that are compared with the goals. Pure."""
    found = [
        Line(
            f"{workers} workers, a rank each: {step}",
            statistics.median(seconds),
            "≤",
            GOAL_SECONDS,
            "s",
            note=f"{statistics.median(alone.busy[step]):.2f} s of processor time",
        )
        for step, seconds in alone.seconds.items()
        if step != "first sum"
    ]
    note = f"they joined in {many.seconds['join'][0]:.2f} s"
    links = f"{ranks} ranks on {workers} workers: links of a worker to others after a sum"
    return [*found, Line(links, many.links, "≤", MOST_LINKS, note=note)]


def measure(addresses: Sequence[str], ranks_per_worker: int, rounds: int) -> Steps:
    size = len(addresses) * ranks_per_worker
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(size)
    shares = share_out(size)
    with ProcessPoolExecutor(len(shares), mp_context=context, initializer=_keep, initargs=(barrier,)) as pool:
        running = [pool.submit(run_ranks, list(addresses), share, size, rounds) for share in shares]
        spans = [found for one in running for found in one.result()]
    seconds = {
        step: [elapsed([rank[step][number] for rank in spans if rank[step][number]]) for number in range(rounds)]
        for step in STEPS
    }
    busy = {
        step: next([after - before for before, after in rank[f"{step}: busy"]] for rank in spans if rank["links"])
        for step in STEPS
    }
    return Steps(seconds, busy, max(int(rank["links"][0][0]) for rank in spans if rank["links"]))


def share_out(size: int) -> list[range]:
    """The ranks of each process. Every process has one at least, since a pool of no threads cannot be made. Pure."""
    processes = min(_PROCESSES, size)
    return [range(first, size, processes) for first in range(processes)]


def elapsed(spans: Sequence[Span]) -> float:
    """From the last call to the last return. Pure."""
    return max(returned for _, returned in spans) - max(called for called, _ in spans)


def _keep(barrier: multiprocessing.synchronize.Barrier) -> None:
    global _barrier
    _barrier = barrier


def run_ranks(addresses: Sequence[str], ranks: Sequence[int], size: int, rounds: int) -> list[dict[str, list[Span]]]:
    """The ranks of one process, a thread each."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: run_rank(addresses[rank % len(addresses)], rank, size, rounds), ranks))


def run_rank(address: str, rank: int, size: int, rounds: int) -> dict[str, list[Span]]:
    names = [name for step in STEPS for name in (step, f"{step}: busy")]
    spans: dict[str, list[Span]] = {name: [] for name in (*names, "links")}
    last = rank == size - 1

    def timed(step: str, act: Callable[[], object], comes: bool = True, apart: bool = True) -> None:
        """All that come begin together, but for the last rank, which comes `apart`, when the others wait."""
        _barrier.wait(_PATIENCE)
        before = read_busy_seconds() if rank == 0 else 0.0
        if last and apart:
            time.sleep(_APART_SECONDS)
        called = time.monotonic()
        if comes:
            act()
        spans[step].append((called, time.monotonic()))
        _barrier.wait(_PATIENCE)
        if rank == 0:
            spans[f"{step}: busy"].append((before, read_busy_seconds()))

    with cd.connect(address) as session:
        for number in range(rounds):
            joined: list[cd.Group] = []
            timed("join", partial(join, session, f"elastic-{size}-{number}", size, rank, joined))
            (group,) = joined
            timed("first sum", partial(group.all_reduce, "sum", np.float32(1)))
            if rank == 0 and not number:
                spans["links"].append((float(count_links()), 0.0))

            timed("leave", group.leave if last else partial(hear_of_departure, group))
            timed("rejoin without it", partial(group.rejoin, size - 1), comes=not last, apart=False)
            timed("join again", partial(group.rejoin, size))
            _barrier.wait(_PATIENCE)
            group.leave()
    return spans


def join(session: cd.Session, name: str, size: int, rank: int, joined: list[cd.Group]) -> None:
    joined.append(session.join(name, size, rank=rank))


def hear_of_departure(group: cd.Group) -> None:
    """A member has left, and the next collective of the others fails with that."""
    try:
        group.barrier()
    except cd.errors.AbortedError:
        return
    raise AssertionError("a barrier without its last rank")


def read_busy_seconds() -> float:
    """Processor time of this host since its start, without what it idled or waited for disks."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / _TICKS


def count_links() -> int:
    """The most connections over TCP that a worker of this benchmark has."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = {f"socket:[{row[9]}]" for row in rows if row[3] == _ESTABLISHED}
    counts = [0]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process that has ended, or of another user
            if {b"worker", b"bench"} <= set((process / "cmdline").read_bytes().split(b"\0")):
                counts.append(sum(os.readlink(one) in established for one in (process / "fd").iterdir()))
    return max(counts)


if __name__ == "__main__":
    main()
