"""A link between two workers stalls, is cut, or says what it should not."""

from __future__ import annotations

from collectived_proto.errors import Code

from ..cell import VICTIM, fault
from ..history import AT_ONCE_SECONDS
from ..proxy import Act, Fault, Place
from ..scene import Scene

LARGE = 1 << 20  # elements: 8 MiB, more than the buffers of a link hold
SIDES = ((0, 1), (VICTIM,))  # ranks at either end of the link that is hit: one of them is named


def one_side(named: tuple[int, ...]) -> bool:
    return named in SIDES


def arm(scene: Scene, act: Act, place: Place) -> None:
    """Puts a fault into all links between the first two workers."""
    links = scene.links(0, 1)
    assert links, "there is no link to hit"
    for flow in (flow for link in links for flow in link.flows):
        flow.arm(Fault(act, place))


def struck(scene: Scene) -> None:
    """Returns when the fault has come about."""
    flows = [flow for link in scene.links_seen for flow in link.flows]
    scene.limit.until(lambda: any(flow.faulted.is_set() for flow in flows), "the fault")
    scene.strike()


def release(scene: Scene) -> None:
    for flow in (flow for link in scene.links_seen for flow in link.flows):
        flow.release()


def in_flight(scene: Scene, act: Act, place: Place) -> None:
    """Everybody submits something large, and the fault comes while it moves."""
    arm(scene, act, place)
    scene.submit(scene.everybody, count=LARGE)
    struck(scene)


@fault("stalls inside a payload", "link", deadline=1.0, workers=(3,), linked=True, short=((True, 3),))
def stalls(scene: Scene) -> None:
    in_flight(scene, Act.HOLD, Place.PAYLOAD)
    outlast(scene)


@fault("never reads", "link", deadline=1.0, workers=(3,), linked=True)
def never_reads(scene: Scene) -> None:
    in_flight(scene, Act.HOLD, Place.ANYWHERE)
    outlast(scene)


def outlast(scene: Scene) -> None:
    """With a timeout the deadline ends it; without, it goes on when the link does."""
    if scene.timeout:
        words = ("within 1.0 s", "all ranks have come", "had not finished")
        scene.hear(Code.DEADLINE_EXCEEDED, (), ranks=scene.everybody, words=words)
        scene.agree()
        scene.alike(scene.everybody)
        release(scene)
    else:
        scene.until_waiting(scene.everybody)
        scene.agree()
        release(scene)
        scene.succeed(scene.everybody)
    scene.again()


@fault("is slow, and in time", "link", workers=(3,), linked=True)
def slow(scene: Scene) -> None:
    """A stall that ends before the deadline is no fault."""
    in_flight(scene, Act.HOLD, Place.PAYLOAD)
    scene.until_waiting(scene.everybody)
    scene.agree()
    release(scene)
    scene.succeed(scene.everybody)


@fault("delivers half a header and closes", "link", workers=(3,), linked=True, short=((True, 3),))
def half_header(scene: Scene) -> None:
    in_flight(scene, Act.CLOSE, Place.HEADER)
    broken(scene)


@fault("delivers half a payload and closes", "link", workers=(3,), linked=True)
def half_payload(scene: Scene) -> None:
    in_flight(scene, Act.CLOSE, Place.PAYLOAD)
    broken(scene)


@fault("is reset inside a payload", "link", workers=(3,), linked=True, short=((False, 3),))
def reset(scene: Scene) -> None:
    in_flight(scene, Act.RESET, Place.PAYLOAD)
    broken(scene)


@fault("is reset while others wait", "link", workers=(3,), linked=True)
def reset_idle(scene: Scene) -> None:
    links = scene.links(0, 1)
    scene.submit(scene.others)
    scene.until_waiting(scene.others)
    scene.strike()
    for link in links:
        link.cut()
    scene.hear(Code.UNAVAILABLE, one_side, within=AT_ONCE_SECONDS, words=("link",))
    scene.agree()
    scene.submit([VICTIM])
    scene.hear(Code.UNAVAILABLE, one_side, ranks=[VICTIM], note=False)
    scene.alike(scene.everybody)
    scene.again()


@fault("delivers garbage", "link", workers=(3,), linked=True, short=((True, 3),))
def garbage(scene: Scene) -> None:
    in_flight(scene, Act.GARBAGE, Place.BETWEEN)
    broken(scene)


def broken(scene: Scene) -> None:
    """Both workers see it; whichever says so first, everybody hears the same."""
    scene.hear(Code.UNAVAILABLE, one_side, ranks=scene.everybody, within=AT_ONCE_SECONDS, words=("link",))
    scene.agree()
    scene.alike(scene.everybody)
    scene.again()


@fault("stalls, and a client aborts", "link", workers=(3,), linked=True)
def aborted(scene: Scene) -> None:
    in_flight(scene, Act.HOLD, Place.PAYLOAD)
    scene.until_waiting(scene.everybody)
    scene.strike()
    scene.victim.ask("abort", now=True, reason="it takes too long").value(scene.limit)
    scene.hear(Code.ABORTED, words=("rank 2", "it takes too long"), within=AT_ONCE_SECONDS)
    scene.agree()
    scene.hear(Code.ABORTED, lambda _: True, ranks=[VICTIM], note=False)
    release(scene)
    scene.again()


@fault("delivers frames of the old generation in the next", "link", workers=(3,), linked=True, short=((False, 3),))
def old_frames(scene: Scene) -> None:
    """What was held arrives when the group has long gone on: nobody takes it for what it is not."""
    in_flight(scene, Act.HOLD, Place.PAYLOAD)
    scene.until_waiting(scene.everybody)
    scene.strike()
    scene.victim.ask("abort", now=True, reason="it takes too long").value(scene.limit)
    scene.hear(Code.ABORTED, words=("rank 2",), within=AT_ONCE_SECONDS)
    scene.hear(Code.ABORTED, lambda _: True, ranks=[VICTIM], note=False)
    scene.again()
    scene.submit(scene.others, count=LARGE)
    scene.until_waiting(scene.others)
    release(scene)
    scene.agree()
    scene.submit([VICTIM], count=LARGE)
    scene.succeed(scene.everybody)
    scene.submit(scene.everybody, count=LARGE)
    scene.succeed(scene.everybody)
    scene.again()


@fault("stalls, and a client is killed", "link", workers=(3,), linked=True)
def killed(scene: Scene) -> None:
    """What the dead one had submitted completes when the link goes on; what comes after it does not."""
    in_flight(scene, Act.HOLD, Place.PAYLOAD)
    scene.until_waiting(scene.everybody)
    scene.victim.kill()
    scene.victim.gone()
    scene.agree()
    release(scene)
    scene.succeed(scene.others)
    scene.submit(scene.others)
    scene.hear(Code.UNAVAILABLE, words=("rank 2",))
    scene.replace(VICTIM)
    scene.again()


@fault("stalls, and a worker is killed", "link", workers=(3,), linked=True, hit=(-1, 1), orphans=((), (VICTIM,)))
def worker_killed(scene: Scene) -> None:
    in_flight(scene, Act.HOLD, Place.PAYLOAD)
    scene.until_waiting(scene.everybody)
    scene.strike()
    scene.cluster.workers[1].kill()
    scene.hear(Code.UNAVAILABLE, within=AT_ONCE_SECONDS)
    scene.hear(Code.UNAVAILABLE, (), ranks=[VICTIM], note=False)
    scene.agree()
    scene.cluster.restart_worker(1, scene.limit)
    scene.limit.until(lambda: scene.cluster.connected(1), "the worker's way to the coordinator")
    scene.again()
