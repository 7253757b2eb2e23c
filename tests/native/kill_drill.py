"""Kill, stop or abort ranks at random moments: survivors must agree, be exact, and never hang.

`python -m tests.native.kill_drill --rounds 2000` is the long form. Each round starts ranks as processes, which carry
out random collectives, blocking and asynchronous, without pause; a watcher stands for the worker. Checked: all
survivors report the same verdict and the same number of completed instances, those of the segment; every result is
exact; all end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tests.native.ranks import Failed, Work, as_bytes, finish, make_geometry
from tests.native.test_schedule import BUILDERS

from collectived_native import core, segment
from collectived_native.segment import Geometry

COUNTS = (1, 100, 5000, 40_000)
LETTER_BYTES = (8, 5000, 300_000, 1_000_000)
READ_DIRECTLY = 4096  # bytes from which a value is read in the other rank's process, in every other round
DEEDS = ("kill", "kill", "kill", "stop", "abort")
HANG_SECONDS = 20.0
STOP_SECONDS = 0.02
EXPECTED = tuple[list[tuple[Work, list[bytes]]], ...]


@dataclass
class Round:
    """What came of one round."""

    deed: str
    problem: str = ""
    instances: int = 0
    seconds: float = 0.0  # from the deed to the last survivor's end


def prepare(seats: int, rank: int) -> list[tuple[Work, list[bytes]]]:
    """All that a rank may be asked to do, and what must come out; the same list on all ranks."""
    found = []
    for build in BUILDERS.values():
        for count in COUNTS:
            work, wanted = build(seats, rank, count)
            found.append((work, as_bytes(wanted)))
    return found


def take_part(
    descriptor: int, geometry: Geometry, rank: int, known: list[tuple[Work, list[bytes]]], seed: int, report: int
) -> None:
    """Carries out collectives until it is over, and reports what it has seen."""
    engine = segment.attach(descriptor, geometry, rank)
    own_chance = random.Random(seed + rank)  # where a value lies is each rank's own affair
    chance = random.Random(seed)  # the same on all ranks
    plans: dict[int, core.Plan] = {}
    done, wrong, in_letter = 0, 0, False
    seats = geometry.seats
    letters = [known[0][0].inputs[0].view("u1")[:0], *(np.full(size, 7, np.uint8) for size in LETTER_BYTES)]
    try:
        while True:
            in_letter = chance.random() < 0.3
            if in_letter:
                letter, root = letters[chance.randrange(len(letters))], chance.randrange(2 * seats)
                if root < seats:
                    wrong += gather_letters(engine, rank, seats, root, letter, own_chance)
                else:
                    wrong += pass_round(engine, rank, seats, letter)
                in_letter = False
            batch = [chance.randrange(len(known)) for _ in range(chance.choice((1, 1, 1, 4)))]
            flight = []
            for index in batch:
                work, wanted = known[index]
                plan = plans.get(index) or plans.setdefault(index, work.plan(engine))
                outputs = work.make_outputs()
                if len(batch) == 1:
                    flight.append((engine.run(plan, work.inputs, outputs, 0, None), outputs, wanted))
                else:
                    flight.append((engine.submit(plan, work.inputs, outputs, 0, None, False), outputs, wanted))
            for job, outputs, wanted in flight:
                finish(engine, job)
                wrong += as_bytes(outputs) != wanted
                done += 1
    except Failed as failure:
        outcome = {"letter": in_letter, "rank": rank, "done": done, "wrong": wrong, "verdict": failure.verdict}
    os.write(report, json.dumps(outcome).encode() + b"\n")


def pass_round(engine: core.Engine, rank: int, seats: int, value: np.ndarray) -> bool:
    """Sends to the next rank and receives from the one before; whether something else arrived."""
    out = np.zeros_like(value)
    receiving = engine.receive((rank - 1) % seats, 3, (out,), 0, b"drill", core.QUIET)
    finish(engine, engine.send((rank + 1) % seats, 3, (value,), 0, b"drill", core.BLOCKING))
    finish(engine, receiving)
    return out.tobytes() != value.tobytes()


def gather_letters(
    engine: core.Engine, rank: int, seats: int, root: int, value: np.ndarray, chance: random.Random
) -> bool:
    """All others send two letters to the root, which takes them from any, and cancels receives or lets them time out;
    whether one is lost, comes twice or is not what was sent.
    """
    each = 2
    if rank != root:
        for _ in range(each):
            finish(engine, engine.send(root, 4, (value,), 0, b"drill", core.BLOCKING))
        return False
    heard: Counter[int] = Counter()
    wrong = False
    while heard.total() < each * (seats - 1):
        out = np.zeros_like(value)
        timeout = chance.choice((0, 0, 1, 1_000_000))
        job = engine.receive(-1, 4, (out,), timeout, b"drill", core.QUIET)
        assert job is not None
        if timeout == 0 and chance.random() < 0.5:
            job.cancel()
        try:
            finish(engine, job)
        except Failed as failure:
            if failure.reason in (core.CANCELLED, core.EXPIRED):
                continue
            raise
        heard[job.source()] += 1
        wrong |= out.tobytes() != value.tobytes()
    return wrong or any(heard[sender] != each for sender in range(seats) if sender != root)


def start(descriptor: int, geometry: Geometry, known: EXPECTED, seed: int, report: int) -> dict[int, int]:
    """Starts all ranks; their process numbers."""
    found = {}
    for rank in range(geometry.seats):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                take_part(descriptor, geometry, rank, known[rank], seed, report)
                status = 0
            finally:
                os._exit(status)
        found[rank] = child
    return found


@dataclass
class Witness:
    """Watches the processes of a round, as a worker does."""

    watcher: core.Watcher
    processes: dict[int, int]
    alive: dict[int, int] = field(default_factory=dict)  # descriptor of a process: its rank
    ended: dict[int, int] = field(default_factory=dict)  # exit status

    def __post_init__(self) -> None:
        self.alive = {os.pidfd_open(process): rank for rank, process in self.processes.items()}

    def look(self, seconds: float) -> None:
        ready, _, _ = select.select(list(self.alive), [], [], seconds)
        for descriptor in ready:
            rank = self.alive.pop(descriptor)
            os.close(descriptor)
            self.ended[rank] = os.waitstatus_to_exitcode(os.waitpid(self.processes[rank], 0)[1])
            if self.ended[rank] < 0:
                self.watcher.lost(rank)
            else:
                self.watcher.left(rank)

    def end_all(self) -> None:
        for descriptor, rank in self.alive.items():
            os.kill(self.processes[rank], signal.SIGKILL)
            os.waitpid(self.processes[rank], 0)
            os.close(descriptor)
        self.alive = {}


def play(geometry: Geometry, known: EXPECTED, chance: random.Random) -> Round:
    """One round."""
    seats, deed, victim = geometry.seats, chance.choice(DEEDS), chance.randrange(geometry.seats)
    descriptor = segment.create(geometry)
    watcher = segment.watch(descriptor, geometry)
    down, up = os.pipe()
    witness = Witness(watcher, start(descriptor, geometry, known, chance.randrange(1 << 30), up))
    os.close(up)
    begun = time.monotonic()
    while watcher.decided()[0] < 3 and time.monotonic() < begun + HANG_SECONDS:
        witness.look(0.001)
    moment = time.perf_counter() + chance.random() ** 2 * 0.02
    while time.perf_counter() < moment:
        pass
    acted = time.monotonic()
    if deed == "kill":
        os.kill(witness.processes[victim], signal.SIGKILL)
    elif deed == "stop":  # the others' deadline passes; it goes on later, and must then read their verdict
        os.kill(witness.processes[victim], signal.SIGSTOP)
        time.sleep(STOP_SECONDS)
        watcher.expire(watcher.decided()[0])
        watcher.abort(core.ABORTED, victim)
        os.kill(witness.processes[victim], signal.SIGCONT)
    else:
        watcher.abort(core.ABORTED, victim)
    while witness.alive and time.monotonic() < acted + HANG_SECONDS:
        witness.look(0.05)
    found = Round(deed, instances=watcher.decided()[0], seconds=time.monotonic() - acted)
    hung = sorted(witness.alive.values())
    witness.end_all()
    with os.fdopen(down, "rb") as stream:
        reports = [json.loads(line) for line in stream]
    survivors = set(range(seats)) - ({victim} if deed == "kill" else set())
    complete, _, reason = watcher.decided()
    verdict = watcher.verdict()
    if hung:
        found.problem = f"ranks {hung} hang"
    elif {report["rank"] for report in reports} < survivors:
        found.problem = f"only {[report['rank'] for report in reports]} reported; exits {witness.ended}"
    elif any(report["wrong"] for report in reports):
        found.problem = f"wrong results: {reports}"
    elif not reason or any(not same_verdict(report, verdict) for report in reports):
        found.problem = f"they disagree: {reports}, the segment says {verdict}"
    elif any(report["done"] > complete for report in reports):
        found.problem = f"more was taken than is complete: {reports}, {complete}"
    watcher.close()
    os.close(descriptor)
    return found


def same_verdict(report: dict[str, Any], verdict: tuple[int, int, int, tuple[int, ...]]) -> bool:
    """Reason and culprit are the same for all, and the instance for those whose collective failed."""
    instance, reason, culprit, missing = report["verdict"]
    if (reason, culprit, tuple(missing)) != verdict[1:]:
        return False
    return bool(report["letter"]) or instance == verdict[0]


def drill(rounds: int, seats: tuple[int, ...], seed: int) -> list[Round]:
    """Plays so many rounds, with each number of ranks in turn; what came of them."""
    chance = random.Random(seed)
    prepared = {}
    for number in set(seats):
        prepared[number] = tuple(prepare(number, rank) for rank in range(number))
    found = []
    for i in range(rounds):
        geometry = make_geometry(seats[i % len(seats)])
        geometry = replace(geometry, direct=chance.choice((READ_DIRECTLY, geometry.direct)))
        found.append(play(geometry, prepared[geometry.seats], chance))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seats", type=int, nargs="+", default=[2, 3, 4, 5])
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = drill(options.rounds, tuple(options.seats), options.seed)
    bad = [one for one in found if one.problem]
    for one in bad:
        print(f"{one.deed}: {one.problem}")
    times = sorted(one.seconds for one in found)
    print(
        f"{len(found)} rounds {dict(Counter(one.deed for one in found))}: {len(bad)} bad; "
        f"{sum(one.instances for one in found)} instances; from the deed to the last end "
        f"median {times[len(times) // 2] * 1e3:.0f} ms, longest {times[-1] * 1e3:.0f} ms"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
