"""Groups whose members come and go: fewer, more, one alone, halves, and waiting that is normal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.drills.cells.clients import wait_for_victim

from collectived_proto.errors import Code

from ..cell import Drill, fault
from ..history import AT_ONCE_SECONDS
from ..processes import Answer, RankProcess
from ..scene import Scene

SETTLE = 0.3
_ONES = 1.0


def cell(what: str, short: bool = False) -> Callable[[Drill], Drill]:
    return fault(what, "group", given=False, short=((False, 3),) if short else ())


def seated(scene: Scene, coming: Sequence[tuple[RankProcess, Answer]], size: int) -> list[RankProcess]:
    """Processes by rank, once all have joined one generation of that size; their first sum is right."""
    told = [(process, answer.value(scene.limit)) for process, answer in coming]
    assert len({one["generation"] for _, one in told}) == 1, f"they are in different generations: {told}"
    ranks = {one["rank"]: process for process, one in told}
    assert sorted(ranks) == list(range(size)), f"expected ranks 0 to {size - 1}, got {sorted(ranks)}"
    assert {one["size"] for _, one in told} == {size}, f"expected {size} ranks, got {told}"
    found = [ranks[rank] for rank in range(size)]
    sum_up(scene, found)
    return found


def sum_up(scene: Scene, processes: Sequence[RankProcess]) -> None:
    """That sums are right is for the history to say."""
    asked = [process.ask("sum", fill=rank + 1.0) for rank, process in enumerate(processes)]
    assert all(answer.value(scene.limit) for answer in asked), "a sum failed"


def rejoin(processes: Sequence[RankProcess], size: int | list[int] | None = None) -> list[tuple[RankProcess, Answer]]:
    return [(process, process.ask("rejoin", size=size)) for process in processes]


def newcomer(scene: Scene, name: str, task: int, size: int | list[int]) -> tuple[RankProcess, Answer]:
    """A process that asks to join."""
    process = scene.hire(task)
    process.ask("connect", worker=scene.way(process)).value(scene.limit)
    return process, process.ask("join", name=name, size=size, settle=SETTLE)


def without(scene: Scene, rank: int) -> list[RankProcess]:
    """That rank is killed while others wait; those that are left, who have heard so."""
    left = [other for other in scene.everybody if other != rank]
    scene.submit(left)
    scene.until_waiting(left)
    scene.strike()
    scene.ranks[rank].kill()
    scene.ranks[rank].gone()
    scene.hear(Code.UNAVAILABLE, [rank], ranks=left, within=AT_ONCE_SECONDS)
    return [scene.ranks[other] for other in left]


def shrink_and_grow(scene: Scene, rank: int) -> None:
    """Those that are left go on as a smaller group; later somebody new comes, and it is as large as before."""
    left = seated(scene, rejoin(without(scene, rank), scene.size - 1), scene.size - 1)
    scene.agree()
    coming = newcomer(scene, scene.group, scene.cell.placement[rank], scene.size)
    seated(scene, [*rejoin(left, scene.size), coming], scene.size)
    scene.agree()


@cell("its last rank is killed: it shrinks, and grows again", short=True)
def shrinks_last(scene: Scene) -> None:
    shrink_and_grow(scene, scene.size - 1)


@cell("a middle rank is killed: it shrinks, and grows again")
def shrinks_middle(scene: Scene) -> None:
    shrink_and_grow(scene, 1)


@cell("all but one leave, and come again")
def down_and_up(scene: Scene) -> None:
    scene.strike()
    for rank in scene.everybody[1:]:
        scene.ranks[rank].ask("leave").value(scene.limit)
    alone = seated(scene, rejoin(scene.ranks[:1], 1), 1)
    scene.agree()
    seated(scene, rejoin([*alone, *scene.ranks[1:]], scene.size), scene.size)
    told(scene)


@cell("one alone, then all")
def single_to_all(scene: Scene) -> None:
    """An elastic group begins with one rank, which sees the others wait, and lets them in."""
    name, most = f"{scene.group}-elastic", scene.size
    scene.strike()
    first = newcomer(scene, name, 0, [1, most])
    members = seated(scene, [first], 1)
    waiting = members[0].ask("until_others_wait", fill=_ONES)
    coming = [newcomer(scene, name, task, [1, most]) for task in scene.cell.placement[1:]]
    waiting.value(scene.limit)
    seated(scene, [*rejoin(members), *coming], most)
    told(scene)


@cell("a newcomer waits, and all see it with the same collective", short=True)
def late(scene: Scene) -> None:
    name, size = f"{scene.group}-elastic", scene.size
    limits = [size, size + 1]
    scene.strike()
    members = seated(scene, [newcomer(scene, name, task, limits) for task in scene.cell.placement], size)
    summing = [process.ask("until_others_wait", fill=_ONES) for process in members]
    last = newcomer(scene, name, 0, limits)
    counts = [answer.value(scene.limit) for answer in summing]
    assert len(set(counts)) == 1, f"they saw it after different numbers of collectives: {counts}"
    seated(scene, [*rejoin(members), last], size + 1)
    scene.agree()
    told(scene)


@cell("a rank is killed: the group goes on with those who come")
def whoever_comes(scene: Scene) -> None:
    """Elastic: nobody says how many are left."""
    name, size = f"{scene.group}-elastic", scene.size
    limits = [2, size]
    members = seated(scene, [newcomer(scene, name, task, limits) for task in scene.cell.placement], size)
    asked = [process.ask("sum", fill=_ONES) for process in members[:-1]]
    scene.strike()
    members[-1].kill()
    members[-1].gone()
    assert not any(answer.value(scene.limit) for answer in asked), "a sum succeeded without one of its ranks"
    left = seated(scene, rejoin(members[:-1]), size - 1)
    summing = [process.ask("until_others_wait", fill=_ONES) for process in left]
    coming = newcomer(scene, name, members[-1].worker, limits)
    counts = [answer.value(scene.limit) for answer in summing]
    assert len(set(counts)) == 1, f"they saw the newcomer after different numbers of collectives: {counts}"
    seated(scene, [*rejoin(left), coming], size)
    told(scene)


@cell("splits and merges")
def splits(scene: Scene) -> None:
    scene.strike()
    for parts in (2, 1, 3):
        asked = [process.ask("halves", color=rank % parts) for rank, process in enumerate(scene.ranks)]
        found = [answer.value(scene.limit) for answer in asked]
        wanted = [len(scene.everybody[rank % parts :: parts]) for rank in scene.everybody]
        assert found == wanted, f"split in {parts}: sums of the parts are {found} instead of {wanted}"
        sum_up(scene, scene.ranks)
    told(scene)


@cell("says that waiting is normal: no warning")
def idle(scene: Scene) -> None:
    """Another group waits as long, and of that the coordinator warns."""
    name = f"{scene.group}-idle"
    processes = [scene.hire(task) for task in scene.cell.placement]
    for process in processes:
        process.ask("connect", worker=scene.way(process)).value(scene.limit)
    joining = [p.ask("join", name=name, size=scene.size, rank=r, idle=True) for r, p in enumerate(processes)]
    for answer in joining:
        answer.value(scene.limit)
    asked = [process.ask("sum", fill=_ONES) for process in processes[1:]]
    tasks = list(range(scene.cell.workers))
    scene.limit.until(
        lambda: any(group_loop.in_flight for group_loop in scene.cluster.group_loops(name, tasks)),
        "waiting in the idle group",
    )
    wait_for_victim(scene)
    scene.until_warned("rank 2", "has waited for 2.0")
    said = [line for daemon in scene.cluster.daemons for line in list(daemon.log) if name in line]
    assert not said, f"of an idle group the daemons said {said}"
    asked.append(processes[0].ask("sum", fill=_ONES))
    assert all(answer.value(scene.limit) for answer in asked), "a sum of the idle group failed"
    scene.submit([rank for rank in scene.everybody if rank not in scene.others])
    scene.succeed(scene.everybody)


def told(scene: Scene) -> None:
    """For the table: it went well."""
    scene.heard, scene.error = None, "success"
