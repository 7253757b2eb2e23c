"""A host is parted from others: packets are lost, in both directions or in one, and nobody is told.

Every worker, with its ranks, is in a network namespace of its own. Where these cannot be had the cells are skipped.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.drills.cells.workers import HIT, LOST_SECONDS, ORPHANS

from collectived_proto.errors import Code

from ..cell import VICTIM, Drill, fault
from ..cluster import HEARTBEAT_SECONDS
from ..history import AT_ONCE_SECONDS
from ..hosts import CONTROL, DATA, Hosts
from ..scene import SEVERAL_ROUNDS, Scene
from ..switch import Weather

AWAY = HIT[1]  # the host that is parted
SUMS, SLOW_SUMS = 20, 3
PATH_SECONDS = 2 * HEARTBEAT_SECONDS + 1.5  # two probes, and two looks after as many heartbeats without an answer


def cell(
    what: str, deadline: float, given: bool = True, without: bool = True, short: tuple[bool, ...] = ()
) -> Callable[[Drill], Drill]:
    return fault(
        what,
        "host",
        deadline=deadline,
        given=given,
        without=without,
        workers=(3,),
        apart=True,
        hit=HIT,
        grace=LOST_SECONDS,
        orphans=((), ORPHANS[1]),
        cap=40.0,
        short=tuple((timed, 3) for timed in short),
    )


def hosts(scene: Scene) -> Hosts:
    assert scene.cluster.hosts is not None
    return scene.cluster.hosts


def healed(scene: Scene) -> None:
    """Packets pass again, and the worker finds its way back."""
    hosts(scene).heal(AWAY)
    scene.limit.until(lambda: scene.cluster.connected(AWAY), "the worker's way back to the coordinator")


@cell("parted from its peers", 1.0, short=(False,))
def from_peers(scene: Scene) -> None:
    """All have come, so who had not finished is what can be said; without a timeout the dead path ends it."""
    scene.strike()
    hosts(scene).part(AWAY, [DATA])
    scene.submit(scene.everybody)
    if scene.timeout:
        said = ["within 1.0 s", "all ranks have come", "had not finished"]
        scene.hear(Code.DEADLINE_EXCEEDED, (), ranks=scene.everybody, words=said)
    else:
        said = ["the network between them is down", "no rank is known to be lost"]
        scene.hear(Code.UNAVAILABLE, (), ranks=scene.everybody, words=said, within=PATH_SECONDS + AT_ONCE_SECONDS)
    scene.agree()
    scene.alike(scene.everybody)
    healed(scene)
    scene.again()


@cell("parted from the coordinator", 8.0)
def from_coordinator(scene: Scene) -> None:
    """After two heartbeats it is lost, and its own rank hears so too, for links still stand."""
    scene.submit(scene.others)
    scene.until_waiting(scene.others)
    scene.strike()
    hosts(scene).part(AWAY, [CONTROL])
    scene.hear(Code.UNAVAILABLE, within=LOST_SECONDS + AT_ONCE_SECONDS)
    scene.agree()
    scene.alike()
    scene.submit([VICTIM])
    scene.hear(Code.UNAVAILABLE, ranks=[VICTIM], note=False)
    healed(scene)
    scene.again()


@cell("parted from both", 1.0, short=(True,))
def from_both(scene: Scene) -> None:
    lost(scene, lambda: hosts(scene).part(AWAY))


@cell("what it sends is lost", 1.0)
def mute(scene: Scene) -> None:
    lost(scene, lambda: hosts(scene).lose_sent(AWAY))


def lost(scene: Scene, strike: Callable[[], None]) -> None:
    """Nothing of the host is heard: the deadline ends it, or the second heartbeat that is missed."""
    code = Code.DEADLINE_EXCEEDED if scene.timeout else Code.UNAVAILABLE
    scene.strike()
    strike()
    scene.submit(scene.everybody, count=SEVERAL_ROUNDS)
    scene.hear(code, within=None if scene.timeout else LOST_SECONDS + AT_ONCE_SECONDS)
    scene.agree()
    scene.alike()
    if scene.timeout:  # its own rank knows at its deadline; without one, when its worker is back
        scene.hear(code, lambda _: True, ranks=[VICTIM], note=False)
    healed(scene)
    if not scene.timeout:
        scene.hear(code, lambda _: True, ranks=[VICTIM], note=False)
    scene.again()


@cell("what is sent to it is lost", 1.0)
def deaf(scene: Scene) -> None:
    """Its heartbeats arrive, but it answers nobody: without a timeout the dead path ends it."""
    scene.strike()
    hosts(scene).lose_received(AWAY)
    scene.submit(scene.everybody, count=SEVERAL_ROUNDS)
    if scene.timeout:
        scene.hear(Code.DEADLINE_EXCEEDED, lambda _: True)
        scene.agree()
        scene.hear(Code.DEADLINE_EXCEEDED, lambda _: True, ranks=[VICTIM], note=False)
    else:
        scene.hear(Code.UNAVAILABLE, lambda _: True, within=PATH_SECONDS + AT_ONCE_SECONDS)
        scene.agree()
        scene.hear(Code.UNAVAILABLE, lambda _: True, ranks=[VICTIM], note=False)
    healed(scene)
    scene.again()


@cell("parted from both for less than two heartbeats", 8.0)
def blinked(scene: Scene) -> None:
    """A partition that is over in time is no fault."""
    scene.submit(scene.others)
    scene.until_waiting(scene.others)
    scene.strike()
    hosts(scene).part(AWAY)
    scene.submit([VICTIM])
    for _ in range(SUMS):
        scene.agree()
    hosts(scene).heal(AWAY)
    scene.succeed(scene.everybody)
    for _ in range(SUMS):
        scene.submit(scene.everybody)
        scene.succeed(scene.everybody)
    scene.limit.until(lambda: scene.cluster.connected(AWAY), "the worker's way to the coordinator")
    scene.again()


@cell("packets are delayed by 100 ms, and 2 % of them are lost", 8.0)
def lossy(scene: Scene) -> None:
    weathered(scene, Weather(loss=0.02, delay=0.1))


@cell("packets are delayed by up to 60 ms, and overtake each other", 8.0, given=False)
def reordered(scene: Scene) -> None:
    weathered(scene, Weather(jitter=0.06))


def weathered(scene: Scene, weather: Weather) -> None:
    """A path that is slow is not dead: everything ends well, only later."""
    scene.strike()
    hosts(scene).impair(weather)
    for count in (1, SEVERAL_ROUNDS):
        for _ in range(SLOW_SUMS):
            scene.submit(scene.everybody, count=count)
            scene.succeed(scene.everybody)
    scene.agree()
    healed(scene)
    scene.again()


@cell("packets are delayed by 100 ms, and then none passes", 8.0, given=False)
def slow_and_dead(scene: Scene) -> None:
    hosts(scene).impair(Weather(delay=0.1))
    scene.submit(scene.everybody)
    scene.succeed(scene.everybody)
    from_peers(scene)
