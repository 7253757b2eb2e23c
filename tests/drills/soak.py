"""A soak: groups that compute for minutes while clients, workers and the coordinator fail at random moments.

Every result is compared with NumPy, and every failed generation must have one verdict: the same code, cause and
culprits on all ranks that hear it. The choices are made from a seed; the moments are the machine's. A rank that does
not hear from its worker in time gives up by itself. Where this machine wakes threads later than a worker may be, that
is no disagreement, and is counted.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.drills.cluster import Cluster
from tests.drills.limits import Limit, Pace
from tests.drills.play import find_defects
from tests.drills.processes import Answer, RankProcess
from tests.drills.soak_steps import make_step

WORKERS = 3
GENERATION_SECONDS = 90.0  # from its joins on, after which it is given up, and its round: a hang
CALM_TIMEOUT, STOP_TIMEOUT = 30.0, 2.0  # seconds of each call, and where a client is stopped
MOST_RANKS, GENERATIONS, INSTANCES = 5, 4, 120  # of a group; in a round; of a generation, at most
REMOTE = 0.2  # of the clients come over TCP
TOO_LATE = 0.1  # seconds: a machine that wakes its threads so late makes workers miss deadlines
EXPECTED: dict[str, tuple[str, ...]] = {  # what the ranks that hear of a fault are told: one of these causes
    "nothing": (),
    "restart of the coordinator": (),
    "kill": ("LOST_RANK",),
    "kill without the coordinator": ("LOST_RANK",),
    "stop": ("DEADLINE",),
    "differ": ("MISMATCH",),
    "abort": ("ABORTED",),
    "fail": ("ABORTED",),
    "leave": ("LEFT",),
    "kill of a worker": ("LOST_WORKER", "LOST_LINK"),  # whatever is noticed first
}
OWN_ACTS = ("differ", "abort", "fail", "leave")  # what a rank does itself


Told = Mapping[int, Mapping[str, Any]]  # what each rank reports, as `SoakReport`


class Judgement(NamedTuple):
    """What a generation came to: what was not as promised, whether a failure was heard of, and who gave up alone."""

    complaints: list[str]
    is_heard: bool
    gave_up: int


@dataclass
class SoakResult:
    """What became of a soak: generations by fault, results that were right, and what was not as promised."""

    burn: bool = False  # beside processes that use every core
    faults: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)  # generations that somebody heard to have failed
    right: int = 0
    violations: list[str] = field(default_factory=list)
    gave_up: int = 0  # ranks that did not hear from their worker in time, on a machine that was too late
    seconds: float = 0.0

    def __str__(self) -> str:
        shown = ", ".join(
            f"{fault}: {count} ({self.failed[fault]} failed)" for fault, count in self.faults.most_common()
        )
        where = ", beside a burner on every core" if self.burn else ""
        return (
            f"Soak of {self.seconds / 60:.1f} minutes{where}: {self.faults.total()} generations, "
            f"{self.right} results as NumPy's, {len(self.violations)} not as promised; "
            f"{self.gave_up} times a rank gave up by itself on a machine that was too late. Faults: {shown}."
        )


def soak(seconds: float, seed: int, burn: bool = False) -> SoakResult:
    """Play rounds for so long, on clusters of three workers; `burn`: beside processes that use every core, niced."""
    result, begin = SoakResult(burn), time.monotonic()
    with contextlib.ExitStack() as ending:
        if burn:
            ending.enter_context(burners())
        cluster, number = None, 0
        while time.monotonic() - begin < seconds:
            cluster = cluster or Cluster(WORKERS)
            number += 1
            one = Round(cluster, f"{seed}/{number}", result)
            try:
                one.play(begin + seconds)
            except Exception as error:
                result.violations.append(f"round {one.seed}, {one.fault}: {type(error).__name__}: {error}")
            defects = find_defects(line for daemon in cluster.daemons for line in daemon.log)
            result.violations += [f"round {one.seed}: a daemon said {line!r}" for line in defects]
            for daemon in cluster.daemons:
                daemon.log.clear()
            if one.is_over:
                cluster.keep_spares()
                continue
            stacks = one.abandon()
            result.violations += [stacks] if stacks else []
            with contextlib.suppress(Exception):
                cluster.close()
            cluster = None
        if cluster is not None:
            cluster.close()
    result.seconds = time.monotonic() - begin
    return result


@contextlib.contextmanager
def burners() -> Iterator[None]:
    """A niced process per core that does nothing but compute."""
    command = ["nice", "-n", "19", sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


class Round:
    """One group from its first generation to its last. `is_over`: it ended in order, and the cluster can be used on."""

    def __init__(self, cluster: Cluster, seed: str, result: SoakResult) -> None:
        self.seed = seed
        self._name = f"soak-{seed}".replace("/", "-")
        self.fault = "the first join"
        self.is_over = False
        self._cluster = cluster
        self._random = random.Random(seed)
        self._result = result
        self._limit = Limit(GENERATION_SECONDS)
        self._cast: list[RankProcess] = []
        size = self._random.randrange(2, MOST_RANKS + 1)
        workers = self._random.sample(range(WORKERS), self._random.randrange(1, WORKERS + 1))
        self._placement = sorted(self._random.choice(workers) for _ in range(size))
        self._ranks = [self._hire(task) for task in self._placement]
        self._joined: set[RankProcess] = set()

    def play(self, until: float) -> None:
        """Play generations, each with a fault; at least one, and none that begins after `until`."""
        for number in range(self._random.randrange(1, GENERATIONS + 1)):
            if number and time.monotonic() > until:
                break
            self._limit = Limit(GENERATION_SECONDS)
            self._join()
            self.fault = self._random.choice(list(EXPECTED))
            self._result.faults[self.fault] += 1
            self._play_generation(f"{self.seed}/{number}")
        self.fault, self._limit = "the end", Limit(GENERATION_SECONDS)
        for process in dict.fromkeys(self._cast):
            if process.alive and not process.spoilt:
                process.ask("close").get(self._limit)
            self._cluster.dismiss(process)
        self.is_over = True

    def abandon(self) -> str:
        """End the processes of a round that has failed; return the stacks of those that did not answer."""
        told = []
        stuck = [process for process in dict.fromkeys(self._cast) if process.alive and process.owes_answer]
        if stuck:
            told += [str(one) for one in self._cluster.group_loops(self._name, sorted(set(self._placement)))]
            told += [f"{process.who}:\n{process.end_with_stacks()}" for process in stuck]
            workers = [self._cluster.workers[task] for task in sorted(set(self._placement))]
            told += [f"worker {worker.pid}:\n{worker.end_with_stacks()}" for worker in workers]
        for process in dict.fromkeys(self._cast):
            process.kill()
            process.close()
        return "\n".join(told)

    def _hire(self, task: int) -> RankProcess:
        process = self._cluster.hire(task)
        self._cast.append(process)
        return process

    def _join(self) -> None:
        """Who was in the group rejoins; who is new connects, some over TCP, and joins."""
        self._limit.until(self._cluster.all_connected, "workers that all have their coordinator")
        answers = []
        for rank, process in enumerate(self._ranks):
            if process in self._joined:
                answers.append(process.ask("rejoin", timeout=30.0))
                continue
            remote = self._random.random() < REMOTE
            ways = self._cluster.far_addresses if remote else self._cluster.addresses
            process.ask("connect", worker=ways[process.worker], timeout=30.0)
            answers.append(process.ask("join", name=self._name, size=len(self._ranks), rank=rank, timeout=30.0))
        found = [answer.value(self._limit) for answer in answers]
        self._joined = set(self._ranks)
        assert [one["rank"] for one in found] == list(range(len(found))), f"the ranks that joined are {found}"
        assert len({one["generation"] for one in found}) == 1, f"ranks of one group are in generations {found}"

    def _play_generation(self, seed: str) -> None:
        victim, last = self._random.randrange(len(self._ranks)), self._random.randrange(1, INSTANCES)
        with Pace() as pace:
            told = self._compute(seed, victim, last)
        self._judge(seed, victim, told, pace.late > TOO_LATE)

    def _compute(self, seed: str, victim: int, last: int) -> dict[int, dict[str, Any]]:
        """Has the ranks compute amid the fault; what those tell that can."""
        timeout = STOP_TIMEOUT if self.fault == "stop" else CALM_TIMEOUT
        at, size = self._random.randrange(last), len(self._ranks)
        while not any(make_step(seed, number, size).needs(victim) for number in range(at, last)):
            last += 1  # what nobody needs the victim for, nobody hears of
        answers = []
        for rank, process in enumerate(self._ranks):
            mine = (self.fault, at) if rank == victim and self.fault in OWN_ACTS else ("", -1)
            answers.append(process.ask("soak", seed=seed, last=last, timeout=timeout, act=mine[0], at=mine[1]))
        time.sleep(self._random.random() * 0.5)  # the moment of the fault is any
        silent = self._strike(victim)
        told = {rank: self._collect(answers[rank]) for rank in range(len(answers)) if rank not in silent}
        for rank in silent:
            self._replace(rank)
        return told

    def _strike(self, victim: int) -> set[int]:
        """Does what this generation suffers; ranks that are gone, or whose worker is."""
        process, cluster = self._ranks[victim], self._cluster
        match self.fault:
            case "kill":
                process.kill()
                return {victim}
            case "kill without the coordinator":
                cluster.coordinator.kill()
                process.kill()
                time.sleep(1.0)  # workers decide alone within that time
                cluster.restart_coordinator(self._limit)
                return {victim}
            case "restart of the coordinator":
                cluster.coordinator.kill()
                cluster.restart_coordinator(self._limit)
            case "stop":
                process.stop()
                time.sleep(2 * STOP_TIMEOUT)
                process.go_on()
            case "kill of a worker":
                task = self._placement[victim]
                cluster.workers[task].kill()
                cluster.restart_worker(task, self._limit)
                return {rank for rank, placed in enumerate(self._placement) if placed == task}
        return set()

    def _collect(self, answer: Answer) -> dict[str, Any]:
        told: dict[str, Any] = answer.value(self._limit)
        self._result.right += told["right"]
        self._result.violations += [f"round {self.seed}, {self.fault}: wrong result of {one}" for one in told["wrong"]]
        return told

    def _replace(self, rank: int) -> None:
        self._ranks[rank].gone()
        self._ranks[rank].kill()
        self._ranks[rank] = self._hire(self._placement[rank])

    def _judge(self, seed: str, victim: int, told: Told, is_late: bool) -> None:
        judged = judge(self.fault, victim, self._placement, told, is_late)
        where = f"round {seed}, {self.fault} of rank {victim}, workers {self._placement}"
        self._result.violations += [f"{where}: {complaint}" for complaint in judged.complaints]
        self._result.failed[self.fault] += judged.is_heard
        self._result.gave_up += judged.gave_up


def _are_instances_right(instances: Mapping[int, Mapping[int, int]]) -> bool:
    """Whether all ranks were told one instance; or several, as where a failure reaches further back than was known at
    first, and every rank hears of it where it stands: none is told of a later one than failed there, and the earliest
    did fail."""
    if len(instances) < 2:
        return True
    covers = all(told <= number for told, failed in instances.items() for number in failed.values())
    return covers and min(instances) in instances[min(instances)].values()


def judge(fault: str, victim: int, placement: Sequence[int], told: Told, is_late: bool) -> Judgement:
    """What a generation came to, by what its ranks told of its failures. Pure.

    Args:
        told: by rank; who cannot tell is not there.
        is_late: the machine was too late for promises in time: a rank whose stopped peer is named by others may have
            given up by itself.
    """
    verdicts: dict[tuple[Any, ...], set[int]] = {}
    instances: dict[int, dict[int, int]] = {}  # that was told -> by rank, the first instance that failed there
    texts, own = {}, []
    for rank, one in told.items():
        for failure in one["failures"]:
            if (
                is_late
                and fault == "stop"
                and (failure["decided_by"], failure["cause"]) == (f"rank {rank}", "DEADLINE")
            ):
                own.append(rank)
                continue
            verdict = (failure["code"], failure["cause"], *map(tuple, (failure["missing"], failure["differing"])))
            verdicts.setdefault(verdict, set()).add(rank)
            texts[verdict] = failure["text"]
            if failure["decided_by"] != f"rank {rank}":
                failed = instances.setdefault(failure["instance"], {})
                failed[rank] = min(failure["number"], failed.get(rank, failure["number"]))
    shown = "; ".join(f"ranks {sorted(ranks)}: {verdict} {texts[verdict]}" for verdict, ranks in verdicts.items())
    complaints = []
    if len(verdicts) > 1:
        complaints.append(f"different verdicts: {shown}")
    elif any(verdict[1] not in EXPECTED[fault] for verdict in verdicts):
        complaints.append(f"expected {EXPECTED[fault]}, got {shown}")
    elif any(not _is_blame_right(fault, victim, placement, verdict[2], verdict[3]) for verdict in verdicts):
        complaints.append(f"not rank {victim} alone is named: {shown}")
    if not _are_instances_right(instances):
        complaints.append(f"instances that verdicts tell of, and the first that failed of each rank: {instances}")
    if not verdicts and fault in ("differ", "abort", "fail"):
        complaints.append("nobody heard of it")
    if own and not verdicts:
        complaints.append(f"ranks {own} gave up by themselves, and nobody else says why")
    return Judgement(complaints, bool(verdicts), len(own))


def _is_blame_right(
    fault: str, victim: int, placement: Sequence[int], missing: Sequence[int], differing: Sequence[int]
) -> bool:
    if fault == "differ":  # of two nobody is the majority
        return victim in differing or (len(placement) == 2 and bool(differing))
    if fault == "stop":  # nobody is named where only the one that was stopped had not finished
        return set(missing) <= {victim}
    if fault == "kill of a worker":
        return victim in missing and all(placement[rank] == placement[victim] for rank in missing)
    return list(missing) == [victim]
