"""The same again and again: what leaks, races and drifts shows only then."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from collectived_proto.errors import Code
from collectived_runtime.engine.record.flight_recorder import MAX_ENTRIES
from collectived_runtime.transport.connections import HANDSHAKE_SECONDS

from ..cell import ALL, VICTIM, Cell
from ..cluster import held
from ..history import AT_ONCE_SECONDS, Event, Gone, Outcome, check
from ..processes import Answer, RankProcess
from ..scene import Scene

PAIRS, SIDE_BY_SIDE = 20, 4
KILLS, LOAD = 50, 1 << 15  # coordinators; elements that each sum of the load has
IN_FLIGHT = (0, 1, 50)  # groups that are being joined while a coordinator dies
INTERRUPTS, SMALL = 200, 1000  # of a rank; elements of the sums that they hit
GENERATIONS, WARM = 140, 60
SAMPLE_EVERY = 20  # generations, from WARM on
# By how much a daemon grows over the last 80 generations, if it keeps something of those that have ended. Less of its
# own memory is the allocator's; less of what is counted, a moment's; and connections are kept for a minute by design.
GROWTH = Counter(kib=1024, connections=4, threads=1, descriptors=1, memfds=1, mapped=1)
CHURN_SECONDS, MOST_CLIENTS, LEAST_CLIENTS = 180.0, 10, 2
CHURN_ALLOWANCE, CHURN_TIMEOUT, CHURN_SETTLE = 1.0, 5.0, 0.3
SPAWN = 0.6  # of the events of churn; the others kill
NEW_GROUP_SECONDS = 2.0  # after its restart a coordinator has formed a group that was waiting
SUM_AT_LEAST_EVERY = 30.0
FAULTS, CLIENTS, STEADY_SUMS = 16, 4, 300  # faults under load; clients; sums of all of them between two faults
FAULT_EVERY, SHARE = 29.0, 0.95  # seconds; of the collectives that there would be without faults
STOPPED_SECONDS = 60.0  # nobody is late who has been stopped
PAUSE_SECONDS = 0.1  # between two sums: what is longer is time lost


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
    asked_for: list[tuple[int, int]] = []  # groups whose joins were in flight
    longest = most = 0.0
    again = 0  # groups that were joined again, for one of their ranks had not been told that they were complete
    scene.ask(scene.everybody, "load", fill=1.0, count=LOAD, timeout=scene.timeout)
    helpers = [cluster.hire(task) for task in range(scene.cell.workers)]
    askers = [cluster.hire(task) for task in (0, scene.cell.workers - 1)]
    for process in (*helpers, *askers):
        process.ask("connect", worker=cluster.addresses[process.worker]).value(scene.limit)
    for number in range(KILLS):
        names = [f"{scene.group}-{number}-{one}" for one in range(IN_FLIGHT[number % len(IN_FLIGHT)])]
        flight: dict[str, Any] = {"names": names, "size": len(askers), "timeout": scene.timeout}
        many = [askers[0].ask("joins", rank=0, **flight)] if names else []
        early = number % (scene.cell.workers + 1)  # so many ask to join before the coordinator dies
        name = f"{scene.group}-{number}"
        small: dict[str, Any] = {"names": [name], "size": len(helpers), "timeout": scene.timeout}
        joins = [p.ask("joins", rank=rank, **small) for rank, p in list(enumerate(helpers))[:early]]
        progress(scene, scene.random.randrange(1, 20))
        cluster.coordinator.kill()
        many += [askers[1].ask("joins", rank=1, **flight)] if names else []
        joins += [p.ask("joins", rank=rank, **small) for rank, p in list(enumerate(helpers))[early:]]
        progress(scene, 5)
        cluster.restart_coordinator(scene.limit)
        restarted = time.monotonic()
        joined = [tuple(one) for answer in joins for one in answer.value(scene.limit)]
        longest = max(longest, time.monotonic() - restarted)
        seen += {(key, generation) for key, generation, _, _ in joined}
        others = [tuple(one) for answer in many for one in answer.value(scene.limit)]
        asked_for += {(key, generation) for key, generation, _, _ in others}
        totals = {total for *_, total, _ in joined}, {total for *_, total, _ in others}
        assert totals[0] == {len(helpers)} and totals[1] <= {len(askers)}, f"ones of new groups were summed to {totals}"
        again += len({key for key, _, _, attempts in (*joined, *others) if attempts > 1})
        most = max(most, time.monotonic() - restarted)
    for rank in scene.everybody:
        scene.ranks[rank].ask("stop", now=True)
    scene.strike()
    scene.succeed(scene.everybody)
    for process in (*helpers, *askers):
        process.ask("close").value(scene.limit)
        cluster.dismiss(process)
    generations = [generation for _, generation in seen]
    assert len(seen) == KILLS and len({key for key, _ in seen}) == KILLS, f"keys repeat or ranks disagree: {seen}"
    wanted = sum(IN_FLIGHT[number % len(IN_FLIGHT)] for number in range(KILLS))
    keys = {key for key, _ in (*seen, *asked_for)}
    assert len(keys) == KILLS + wanted, f"{KILLS + wanted} groups have {len(keys)} keys"
    assert generations == sorted(set(generations)), f"generations do not rise: {generations}"
    assert longest <= NEW_GROUP_SECONDS + scene.late, f"a new group took {longest:.2f} s after a restart"
    sums = len(scene.ranks[0].outcomes())
    scene.notes.append(f"{KILLS} kills, {sums} sums went on, new groups at most {longest:.2f} s after a restart")
    scene.notes.append(
        f"with {', '.join(map(str, IN_FLIGHT))} more groups being joined meanwhile: {wanted} of {wanted} were, "
        f"all at most {most:.2f} s after a restart; {again} were joined twice"
    )


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


def deaths_in_a_row(scene: Scene) -> None:
    cluster = scene.cluster
    scene.ask(scene.everybody, "load", fill=1.0, count=SMALL)
    progress(scene, MAX_ENTRIES)  # what the flight recorders take is no growth
    for rank in scene.everybody:
        scene.ranks[rank].ask("stop", now=True)
    scene.succeed(scene.everybody)
    samples: list[tuple[int, list[Counter[str]]]] = []
    for number in range(GENERATIONS):
        scene.submit(scene.others)
        scene.until_waiting(scene.others)
        scene.strike()
        scene.victim.kill()
        scene.hear(Code.UNAVAILABLE, words=("rank 2",), within=AT_ONCE_SECONDS)
        scene.replace(VICTIM)
        scene.again()
        cluster.keep_spares()
        if number >= WARM and number % SAMPLE_EVERY == 0:
            samples.append((number, settled(scene)))
    samples.append((GENERATIONS, settled(scene)))
    times = [number for number, _ in samples]
    for index, name in enumerate(["coordinator", *(f"worker {task}" for task in range(scene.cell.workers))]):
        held_by_it = [held_at[index] for _, held_at in samples]
        growth = {what: trend(times, [one[what] for one in held_by_it]) for what in GROWTH}
        first, last = held_by_it[0], held_by_it[-1]
        shown = ", ".join(f"{what} {first[what]} → {last[what]} (trend {growth[what]:+.1f})" for what in first)
        scene.notes.append(f"{name}: {shown}")
        grown = [what for what in growth if growth[what] >= GROWTH[what]]
        assert not grown, f"from generation {WARM} to {GENERATIONS} {name} has grown in {grown}: {shown}"


def trend(times: Sequence[float], values: Sequence[float]) -> float:
    """By how much a line through all samples rises from the first to the last: one sample alone decides nothing."""
    return statistics.linear_regression(times, values).slope * (times[-1] - times[0])


def settled(scene: Scene) -> list[Counter[str]]:
    """What each daemon holds, once nothing of what has ended is held any more.

    A link that comes when its group loop has ended is kept as long as a greeting may take: somebody might want it yet.
    """
    counted = GROWTH.keys() - {"kib"}
    latest: list[Counter[str]] = []
    since = time.monotonic()

    def steady() -> bool:
        nonlocal latest, since
        before, latest = latest, [held(daemon.pid) for daemon in scene.cluster.daemons]
        now = time.monotonic()
        if [[one[what] for what in counted] for one in before] != [[one[what] for what in counted] for one in latest]:
            since = now
        return now - since > HANDSHAKE_SECONDS

    scene.limit.until(steady, "daemons that hold the same for a while")
    return latest


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


# Work that is lost to faults.


def faults_under_load(scene: Scene) -> None:
    """Clients of an elastic group are killed or stopped in turn, and replaced or let go on: how much work is lost?"""
    cluster = scene.cluster
    tasks = [number % scene.cell.workers for number in range(CLIENTS)]
    part: dict[str, Any] = {"size": [LEAST_CLIENTS, CLIENTS], "settle": CHURN_SETTLE, "timeout": scene.timeout}
    part["name"] = scene.group
    ending: dict[RankProcess, Answer] = {}
    everybody: list[RankProcess] = []

    def begin(task: int) -> RankProcess:
        process = cluster.hire(task)
        process.ask("connect", worker=cluster.addresses[task])
        ending[process] = process.ask("churn", **part)
        everybody.append(process)
        return process

    def steady(processes: list[RankProcess], after: int = 0) -> int:
        """The generation, later than that, in which all of them have done so many sums."""

        def done() -> bool:
            latest = [process.joined[-1][1] if process.joined else 0 for process in processes]
            if len(set(latest)) > 1 or latest[0] <= after:
                return False
            return all(summed(process, latest[0]) >= STEADY_SUMS for process in processes)

        scene.limit.until(done, f"{STEADY_SUMS} sums of all clients in one generation")
        return processes[0].joined[-1][1]

    living = [begin(task) for task in tasks]
    generation = steady(living)
    began = time.monotonic()
    for number in range(FAULTS):
        place = scene.random.randrange(CLIENTS)
        victim = living[place]
        if number % 2:
            victim.stop()
            left = [process for process in living if process is not victim]
            generation = steady(left, generation)
            victim.go_on()
        else:
            victim.kill()
            victim.gone()
            living[place] = begin(tasks[place])
            cluster.keep_spares()
        generation = steady(living, generation)
    took = time.monotonic() - began
    for process in living:
        process.ask("stop", now=True)
    for process in living:
        ending[process].value(scene.limit)
    events = [event for process in everybody for event in process.events]
    violations = check(events, STOPPED_SECONDS)
    sums = sorted({e.at for e in events if isinstance(e, Outcome) and e.code is Code.OK and began <= e.at})
    gaps = [after - before for before, after in itertools.pairwise(sums)]
    lost = sum(gap for gap in gaps if gap > PAUSE_SECONDS) / FAULTS
    share = 1 - lost / FAULT_EVERY
    scene.notes.append(
        f"{FAULTS} faults in {took:.0f} s, {lost:.2f} s without a sum for each: with a fault every {FAULT_EVERY:.0f} s "
        f"{share:.1%} of the time is work"
    )
    for process in everybody:
        process.gone()
        cluster.dismiss(process)
    assert not violations, f"{len(violations)} violations, the first: " + "; ".join(violations[:3])
    assert share >= SHARE, f"only {share:.1%} of the time is work"


def summed(process: RankProcess, generation: int) -> int:
    """How many sums of a generation have gone well for this process, as far as it matters."""
    count = 0
    for event in reversed(list(process.events)):
        if count >= STEADY_SUMS or event_is_older(event, generation):
            break
        count += isinstance(event, Outcome) and event.code is Code.OK
    return count


def event_is_older(event: Event, generation: int) -> bool:
    return not isinstance(event, Gone) and event.generation != generation


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
    Cell("endurance", f"{GENERATIONS} generations, each with a death", "client", deaths_in_a_row, 8.0, 3, 300.0),
    Cell("endurance", "SIGKILL and SIGSTOP under load", "client", faults_under_load, 1.0, 3, 180.0, alone=True),
    Cell("endurance", "churn", "client", churn, CHURN_TIMEOUT, 3, CHURN_SECONDS + 60.0, alone=True),
]
