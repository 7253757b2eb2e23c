"""The same again and again: what leaks, races and drifts shows only then."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from collectived_proto.errors import Code

from ..cell import ALL, VICTIM, Cell
from ..cluster import held
from ..history import AT_ONCE_SECONDS, Outcome, check
from ..processes import Answer, RankProcess
from ..scene import Scene

PAIRS, SIDE_BY_SIDE = 20, 4
KILLS, LOAD = 50, 1 << 15  # coordinators; elements that each sum of the load has
INTERRUPTS, SMALL = 200, 1000  # of a rank; elements of the sums that they hit
GENERATIONS, WARM = 100, 20
GROWTH_KIB = 1024  # of a daemon's own memory over the last 80 generations: less is the allocator's
CHURN_SECONDS, MOST_CLIENTS, LEAST_CLIENTS = 180.0, 10, 2
CHURN_ALLOWANCE, CHURN_TIMEOUT, CHURN_SETTLE = 1.0, 5.0, 0.3
SPAWN = 0.6  # of the events of churn; the others kill
NEW_GROUP_SECONDS = 2.0  # after its restart a coordinator has formed a group that was waiting
SUM_AT_LEAST_EVERY = 30.0


# One rank never comes: it is named. One rank comes late, and in time: nothing happens.


def pairs(scene: Scene) -> None:
    cell = replace(scene.cell, alone=False, bystanders=False)
    scenes = [scene.beside(cell) for _ in range(SIDE_BY_SIDE)]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        list(threads.map(lambda one: several_pairs(one, PAIRS // SIDE_BY_SIDE), scenes))
    scene.notes.append(f"{PAIRS} times named, {PAIRS} times no alarm")
    scene.error, scene.named = scenes[0].error, scenes[0].named
    scene.heard = max(one.heard or 0.0 for one in scenes)


def several_pairs(scene: Scene, count: int) -> None:
    scene.begin()
    for _ in range(count):
        scene.submit(scene.others)
        scene.until_warned("rank 2", f"#{scene.submitted - 1} ", "has waited")
        scene.submit([VICTIM])
        scene.succeed(scene.everybody)
        scene.submit(scene.others)
        scene.until_waiting(scene.others)
        scene.strike()
        scene.hear(Code.DEADLINE_EXCEEDED, words=("rank 2",))
        scene.again()
    violations = scene.violations()
    assert not violations, "; ".join(violations)
    scene.end()


# Coordinators die under load.


def fifty_kills(scene: Scene) -> None:
    """A group sums all the time; others join before, during and after; clients die meanwhile."""
    cluster = scene.cluster
    seen: list[tuple[int, int]] = []
    longest = 0.0
    scene.ask(scene.everybody, "load", fill=1.0, count=LOAD, timeout=scene.timeout)
    helpers = [cluster.hire(task) for task in range(scene.cell.workers)]
    for process in helpers:
        process.ask("connect", worker=cluster.addresses[process.worker]).value(scene.limit)
    for number in range(KILLS):
        early = number % (scene.cell.workers + 1)  # so many ask to join before the coordinator dies
        name = f"{scene.group}-{number}"
        joins = [p.ask("join", name=name, size=len(helpers), rank=r) for r, p in list(enumerate(helpers))[:early]]
        progress(scene, scene.random.randrange(1, 20))
        cluster.coordinator.kill()
        joins += [p.ask("join", name=name, size=len(helpers), rank=r) for r, p in list(enumerate(helpers))[early:]]
        progress(scene, 5)
        cluster.restart_coordinator(scene.limit)
        restarted = time.monotonic()
        joined = [answer.value(scene.limit) for answer in joins]
        longest = max(longest, time.monotonic() - restarted)
        seen += {(one["key"], one["generation"]) for one in joined}
        asked = [p.ask("sum", fill=1.0, timeout=scene.timeout) for p in helpers]
        assert all(answer.value(scene.limit) for answer in asked), "a sum of a new group failed"
        for process in helpers:
            process.ask("leave").get(scene.limit)
    for rank in scene.everybody:
        scene.ranks[rank].ask("stop", now=True)
    scene.strike()
    scene.succeed(scene.everybody)
    for process in helpers:
        process.ask("close").value(scene.limit)
        cluster.dismiss(process)
    generations = [generation for _, generation in seen]
    assert len(seen) == KILLS and len({key for key, _ in seen}) == KILLS, f"keys repeat or ranks disagree: {seen}"
    assert generations == sorted(set(generations)), f"generations do not rise: {generations}"
    assert longest <= NEW_GROUP_SECONDS + scene.late, f"a new group took {longest:.2f} s after a restart"
    sums = len(scene.ranks[0].outcomes())
    scene.notes.append(f"{KILLS} kills, {sums} sums went on, new groups at most {longest:.2f} s after a restart")


def progress(scene: Scene, sums: int) -> None:
    """Returns when the load has done so many more."""
    before = len(scene.ranks[0].events)

    def done() -> bool:
        assert not scene.answered(0), f"the load has ended: {scene.ranks[0].outcomes()[-1]}"
        return len(scene.ranks[0].events) >= before + 2 * sums

    scene.limit.until(done, f"{sums} more sums")


# Ctrl-C at any moment, while everybody is busy, and nobody has a timeout.


def hundred_interrupts(scene: Scene) -> None:
    """Everybody sums without end, Ctrl-C hits one rank, which leaves, and all go on in the next generation."""
    for _ in range(INTERRUPTS):
        scene.ask(scene.everybody, "load", fill=1.0, count=SMALL)
        progress(scene, scene.random.randrange(1, 30))
        scene.strike()
        while not scene.answered(VICTIM):  # between two collectives it is not felt
            scene.victim.interrupt()
            scene.limit.until(lambda: scene.answered(VICTIM) or scene.random.random() < 0.1, "the interrupt")
        scene.hear(Code.ABORTED, ranks=scene.everybody, within=AT_ONCE_SECONDS)
        scene.again()
    scene.notes.append(f"{INTERRUPTS} interrupts, {len(scene.ranks[0].outcomes())} sums before them")
    scene.notes.append(f"joined again in {1000 * statistics.median(scene.rejoined):.0f} ms (median)")


# Generations of one group, each ended by a death.


def hundred_generations(scene: Scene) -> None:
    cluster = scene.cluster
    for number in range(GENERATIONS):
        scene.submit(scene.others)
        scene.until_waiting(scene.others)
        scene.strike()
        scene.victim.kill()
        scene.hear(Code.UNAVAILABLE, words=("rank 2",), within=AT_ONCE_SECONDS)
        scene.replace(VICTIM)
        scene.again()
        cluster.keep_spares()
        if number == WARM:
            warm = settled(scene)
    then = settled(scene)
    names = ["coordinator", *(f"worker {task}" for task in range(scene.cell.workers))]
    for name, early, late in zip(names, warm, then, strict=True):
        shown = ", ".join(f"{what} {early[what]} → {late[what]}" for what in early)
        scene.notes.append(f"{name}: {shown}")
        grown = [what for what in ("threads", "descriptors", "memfds", "mapped") if late[what] > early[what]]
        grown += ["kib"] * (late["kib"] > early["kib"] + GROWTH_KIB)
        assert not grown, f"from generation {WARM} to {GENERATIONS} {name} has grown in {grown}: {shown}"


def settled(scene: Scene) -> list[Counter[str]]:
    """What each daemon holds, once nothing of what has ended is held any more."""
    seen: list[list[Counter[str]]] = []

    def steady() -> bool:
        seen.append([held(daemon.pid) for daemon in scene.cluster.daemons])
        return len(seen) > 40 and all(
            [now[what] for now in seen[-1]] == [before[what] for before in seen[-40]]
            for what in ("threads", "descriptors", "memfds", "mapped")
        )

    scene.limit.until(steady, "daemons that hold the same for a while")
    return seen[-1]


# Churn: clients come and are killed at random.


def churn(scene: Scene) -> None:
    """Clients of an elastic group are spawned and killed all the time; whoever is there sums."""
    cluster, chance = scene.cluster, scene.random
    living: list[RankProcess] = []
    everybody: list[RankProcess] = []
    ending: dict[RankProcess, Answer] = {}
    spawned = killed = 0
    end = time.monotonic() + CHURN_SECONDS
    while time.monotonic() < end:
        wanted = chance.random() < SPAWN
        if (wanted and len(living) < MOST_CLIENTS) or len(living) <= LEAST_CLIENTS:
            process = cluster.hire(chance.randrange(scene.cell.workers))
            process.ask("connect", worker=cluster.addresses[process.worker])
            size = [LEAST_CLIENTS, MOST_CLIENTS]
            part: dict[str, Any] = {"size": size, "settle": CHURN_SETTLE, "timeout": CHURN_TIMEOUT}
            ending[process] = process.ask("churn", name=scene.group, **part)
            living.append(process)
            everybody.append(process)
            spawned += 1
        else:
            process = living.pop(chance.randrange(len(living)))
            process.kill()
            process.gone()
            killed += 1
        cluster.keep_spares()
        time.sleep(chance.uniform(0.2, 0.5))  # this is the drill: at a random moment something happens
    for process in living:
        process.ask("stop", now=True)
    for process in living:
        ending[process].value(scene.limit)
    events = [event for process in everybody for event in process.events]
    sums = sorted(event.at for event in events if isinstance(event, Outcome) and event.code is Code.OK)
    gaps = [after - before for before, after in zip([end - CHURN_SECONDS, *sums], [*sums, end], strict=True)]
    violations = check(events, CHURN_ALLOWANCE + scene.late)
    scene.notes.append(
        f"{spawned} spawned, {killed} killed, {len({g for p in everybody for _, g in p.joined})} generations, "
        f"{len(sums)} outcomes of right sums, longest pause {max(gaps):.1f} s"
    )
    for process in everybody:
        process.gone()
        cluster.dismiss(process)
    assert not violations, f"{len(violations)} violations, the first: " + "; ".join(violations[:3])
    assert max(gaps) <= SUM_AT_LEAST_EVERY, f"no sum for {max(gaps):.1f} s"


ALL += [
    Cell("endurance", "one of four never comes, or comes late", "client", pairs, 2.0, 3, 120.0, alone=True),
    Cell(
        "endurance", f"{KILLS} times SIGKILL under load", "coordinator", fifty_kills, 20.0, 3, 300.0, bystanders=False
    ),
    Cell(
        "endurance",
        f"{INTERRUPTS} times Ctrl-C under load",
        "client",
        hundred_interrupts,
        0.0,
        3,
        120.0,
        bystanders=False,
    ),
    Cell("endurance", f"{GENERATIONS} generations, each with a death", "client", hundred_generations, 8.0, 3, 300.0),
    Cell("endurance", "churn", "client", churn, CHURN_TIMEOUT, 3, CHURN_SECONDS + 60.0, alone=True),
]
