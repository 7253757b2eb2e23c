"""A host is parted from others: packets are lost, in both directions or in one, and nobody is told.

Every worker, with its ranks, is in a network namespace of its own. Where these cannot be had the cells are skipped.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.drills.cells.workers import HIT, LOST_SECONDS, ORPHANS

from collectived_proto.errors import Code

from ..cell import VICTIM, Drill, fault
from ..history import AT_ONCE_SECONDS
from ..hosts import CONTROL, DATA, Hosts
from ..scene import SEVERAL_ROUNDS, Scene

AWAY = HIT[1]  # the host that is parted
SUMS = 20


def cell(
    what: str, deadline: float, given: bool = True, without: bool = True, short: bool = False
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
        short=((given, 3),) if short else (),
    )


def hosts(scene: Scene) -> Hosts:
    assert scene.cluster.hosts is not None
    return scene.cluster.hosts


def healed(scene: Scene) -> None:
    """Packets pass again, and the worker finds its way back."""
    hosts(scene).heal(AWAY)
    scene.limit.until(lambda: scene.cluster.connected(AWAY), "the worker's way back to the coordinator")


@cell("parted from its peers", 1.0)
def from_peers(scene: Scene) -> None:
    """All have come, so who had not finished is what can be said; without a timeout it goes on where it was."""
    scene.strike()
    hosts(scene).part(AWAY, [DATA])
    scene.submit(scene.everybody)
    if scene.timeout:
        words = ("within 1.0 s", "all ranks have come", "had not finished")
        scene.hear(Code.DEADLINE_EXCEEDED, (), ranks=scene.everybody, words=words)
        scene.agree()
        scene.alike(scene.everybody)
        healed(scene)
    else:
        scene.until_waiting(scene.everybody)
        scene.agree()
        healed(scene)
        scene.succeed(scene.everybody)
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


@cell("parted from both", 1.0, short=True)
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
    """Its heartbeats arrive, so nobody takes it for lost."""
    scene.strike()
    hosts(scene).lose_received(AWAY)
    scene.submit(scene.everybody, count=SEVERAL_ROUNDS)
    if scene.timeout:
        scene.hear(Code.DEADLINE_EXCEEDED, lambda _: True)
        scene.agree()
        scene.hear(Code.DEADLINE_EXCEEDED, lambda _: True, ranks=[VICTIM], note=False)
        healed(scene)
    else:
        scene.until_waiting(scene.everybody)
        scene.agree()
        healed(scene)
        scene.succeed(scene.everybody)
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
