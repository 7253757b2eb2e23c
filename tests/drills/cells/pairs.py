"""Two faults at once: whichever of them is told, everybody is told the same, and the group can go on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from collectived_proto.errors import Code

from ..cell import ALL, VICTIM, Cell, Drill
from ..history import AT_ONCE_SECONDS
from ..scene import Scene

DYING = 3  # the rank whose process is killed; it and the victim are those that have not come
DEADLINE = 8.0


@dataclass(frozen=True, slots=True)
class Single:
    """One of two faults.

    Attributes:
        strike: makes it happen. mend: makes it good, but for ranks. code: of its verdict; None: it has none.
        named: culprits that its verdict may name. dead: ranks whose processes are to be replaced.
    """

    name: str
    strike: Callable[[Scene], None]
    code: Code | None
    named: tuple[tuple[int, ...], ...] = ()
    dead: tuple[int, ...] = ()
    mend: Callable[[Scene], None] = lambda scene: None


def kill_client(scene: Scene) -> None:
    scene.ranks[DYING].kill()


def abort(scene: Scene) -> None:
    scene.victim.ask("abort", now=True, reason="enough")


def reset_link(scene: Scene) -> None:
    for link in scene.links(0, 1):
        link.cut()


def kill_worker(scene: Scene) -> None:
    scene.cluster.workers[scene.cell.hit].kill()


def restart_worker(scene: Scene) -> None:
    scene.cluster.restart_worker(scene.cell.hit, scene.limit)


def kill_coordinator(scene: Scene) -> None:
    scene.cluster.coordinator.kill()


def restart_coordinator(scene: Scene) -> None:
    scene.cluster.restart_coordinator(scene.limit)


SINGLES = (
    Single("SIGKILL of the coordinator", kill_coordinator, None, mend=restart_coordinator),
    Single("SIGKILL of a client", kill_client, Code.UNAVAILABLE, ((DYING,),), (DYING,)),
    Single("an abort", abort, Code.ABORTED, ((VICTIM,),)),
    Single("a reset link", reset_link, Code.UNAVAILABLE, ((0, 1), (VICTIM,))),
    Single("SIGKILL of a worker", kill_worker, Code.UNAVAILABLE, ((VICTIM,),), mend=restart_worker),
)


def both(scene: Scene, pair: tuple[Single, Single]) -> None:
    """Others wait, both happen, and who is left hears of one."""
    left = [rank for rank in scene.others if rank != DYING]
    scene.submit(left)
    scene.until_waiting(left)
    scene.strike()
    for single in scene.random.sample(pair, 2):
        single.strike(scene)
    codes = [single.code for single in pair if single.code is not None]
    named = {culprits for single in pair for culprits in single.named}
    found = scene.outcomes(left)
    for rank, outcome in found.items():
        fits = any(set(outcome.missing) <= set(one) | set(other) for one in named for other in named)
        assert outcome.code in codes and fits, f"rank {rank}: {outcome.verdict} ({outcome.text})"
    heard = max(outcome.at for outcome in found.values()) - scene.struck_at
    assert heard <= AT_ONCE_SECONDS + scene.late, f"heard after {heard:.3f} s"
    scene.tell(heard, found[left[0]])
    scene.agree()
    for single in pair:
        single.mend(scene)
    scene.limit.until(scene.cluster.all_connected, "all workers' way to the coordinator")
    scene.alike(left)
    for rank in {rank for single in pair for rank in single.dead}:
        scene.replace(rank)
    scene.again()


def _cells() -> Iterator[Cell]:
    for pair in itertools.combinations(SINGLES, 2):

        def drill(scene: Scene, pair: tuple[Single, Single] = pair) -> None:
            both(scene, pair)

        worker = SINGLES[-1] in pair
        shown = f"{pair[0].name} and {pair[1].name}"
        for deadline in (DEADLINE, 0.0):
            yield _cell(shown, drill, deadline, worker)


def _cell(shown: str, drill: Drill, deadline: float, worker: bool) -> Cell:
    orphans = (VICTIM,) if worker else ()
    hit = 1 if worker else -1
    return Cell("faults", shown, "two at once", drill, deadline, 3, linked=True, hit=hit, orphans=orphans)


ALL.extend(_cells())
