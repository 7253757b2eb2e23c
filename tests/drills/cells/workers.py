"""A worker dies, stops, is parted from others, or is pestered by strangers."""

from __future__ import annotations

import contextlib
import socket

from collectived_proto.errors import Code
from collectived_runtime.transport.hello import HELLO_BYTES

from ..cell import VICTIM, fault
from ..cluster import HEARTBEAT_SECONDS
from ..history import AT_ONCE_SECONDS
from ..proxy import GARBAGE, Act, Fault, Place
from ..scene import SEVERAL_ROUNDS, Scene

HIT = (0, 1)  # task of the worker that is hit: where there is one, and where there are three
ORPHANS = ((0, 1, 2), (VICTIM,))  # its ranks
LOST_SECONDS = 2 * HEARTBEAT_SECONDS  # after which a worker that is not heard of is lost
ASKED_SECONDS = 10.0  # after which a client without a deadline knows that its worker does not answer


def elsewhere(scene: Scene) -> list[int]:
    """Ranks on workers that are not hit."""
    return [rank for rank in scene.everybody if rank not in scene.cell.orphans]


def are_by_themselves(scene: Scene) -> bool:
    """Whether the ranks carry out their collectives themselves, in a segment."""
    return scene.cell.workers == 1 and not scene.cell.remote


def come_back(scene: Scene) -> None:
    """The worker is started again, as its supervisor would; its clients connect to it again."""
    scene.cluster.restart_worker(scene.cell.hit, scene.limit)
    scene.limit.until(lambda: scene.cluster.connected(scene.cell.hit), "the worker's way to the coordinator")
    scene.again()


@fault("SIGKILL while others wait", "worker", hit=HIT, orphans=ORPHANS, short=((True, 3),))
def killed(scene: Scene) -> None:
    waiting = elsewhere(scene) or scene.others
    scene.submit(waiting)
    scene.until_waiting(waiting)
    scene.strike()
    scene.cluster.workers[scene.cell.hit].kill()
    named = (VICTIM,) if elsewhere(scene) else ()
    scene.hear(Code.UNAVAILABLE, named, ranks=waiting, within=AT_ONCE_SECONDS)
    scene.submit([VICTIM])
    scene.hear(Code.UNAVAILABLE, (), ranks=[VICTIM], words=(f"worker {scene.cell.hit} (at",), note=False)
    scene.agree()
    scene.alike(scene.everybody)
    come_back(scene)


@fault("SIGKILL while nothing runs", "worker", workers=(3,), hit=HIT, orphans=ORPHANS)
def killed_idle(scene: Scene) -> None:
    """Noticed all the same: the next call fails at once. Ranks in a segment may carry it out before that."""
    scene.strike()
    scene.cluster.workers[scene.cell.hit].kill()
    scene.limit.until(lambda: unknown_to_coordinator(scene), "the coordinator's notice")
    scene.submit(scene.everybody)
    scene.hear(Code.UNAVAILABLE, (VICTIM,), ranks=elsewhere(scene))
    scene.hear(Code.UNAVAILABLE, (), ranks=scene.cell.orphans, note=False)
    scene.agree()
    scene.alike(scene.everybody)
    come_back(scene)


def unknown_to_coordinator(scene: Scene) -> bool:
    """Whether the coordinator has lost the worker; asked through another one."""
    told = scene.cluster.status(0, 2.0, local_only=False)
    return scene.cell.hit not in [worker.task for worker in told.workers if worker.connected]


@fault(
    "SIGSTOP while others wait",
    "worker",
    deadline=1.0,
    hit=HIT,
    orphans=ORPHANS,
    grace=LOST_SECONDS,
    cap=30.0,
    short=((True, 3),),
)
def stopped(scene: Scene) -> None:
    """With a timeout it is the deadline that ends it. Without, who is not heard of for two heartbeats is lost."""
    code = Code.DEADLINE_EXCEEDED if scene.timeout else Code.UNAVAILABLE
    waiting = elsewhere(scene) or scene.others
    scene.submit(waiting)
    scene.until_waiting(waiting)
    scene.strike()
    worker = scene.cluster.workers[scene.cell.hit]
    worker.stop()
    scene.submit([VICTIM])
    if are_by_themselves(scene):
        scene.succeed(scene.everybody)
        worker.go_on()
        scene.limit.until(lambda: scene.cluster.connected(scene.cell.hit), "the worker's way back to the coordinator")
        scene.again()
        return
    if elsewhere(scene):
        scene.hear(code, within=None if scene.timeout else LOST_SECONDS + AT_ONCE_SECONDS, ranks=waiting)
        scene.agree()
    else:
        for rank in waiting:
            named = (rank,) if scene.timeout else ()
            scene.hear(code, named, ranks=[rank], within=None if scene.timeout else ASKED_SECONDS + AT_ONCE_SECONDS)
    within = None if scene.timeout else ASKED_SECONDS + AT_ONCE_SECONDS
    # A rank whose own worker does not answer by its deadline names itself, as the others do.
    named = (VICTIM,) if scene.timeout else ()
    scene.hear(code, named, ranks=[VICTIM], within=within, words=(f"worker {scene.cell.hit} (at",), note=False)
    worker.go_on()
    scene.limit.until(lambda: scene.cluster.connected(scene.cell.hit), "the worker's way back to the coordinator")
    scene.again()


@fault(
    "SIGSTOP while data moves",
    "worker",
    deadline=1.0,
    workers=(3,),
    linked=True,
    hit=HIT,
    orphans=ORPHANS,
    grace=LOST_SECONDS,
    cap=30.0,
)
def stopped_inside(scene: Scene) -> None:
    """All have come, and one worker falls silent with the data half way."""
    code = Code.DEADLINE_EXCEEDED if scene.timeout else Code.UNAVAILABLE
    for flow in (flow for link in scene.links(0, 1) for flow in link.flows):
        flow.arm(Fault(Act.HOLD, Place.PAYLOAD))
    scene.submit(scene.everybody, count=SEVERAL_ROUNDS)
    scene.until_waiting(scene.everybody)
    scene.strike()
    worker = scene.cluster.workers[1]
    worker.stop()
    scene.hear(code, within=None if scene.timeout else LOST_SECONDS + AT_ONCE_SECONDS)
    scene.agree()
    scene.hear(code, (VICTIM,) if scene.timeout else (), ranks=[VICTIM], words=("worker 1 (at",), note=False)
    worker.go_on()
    scene.limit.until(lambda: scene.cluster.connected(1), "the worker's way back to the coordinator")
    scene.again()


@fault("SIGSTOP for less than two heartbeats", "worker", hit=HIT)
def napped(scene: Scene) -> None:
    """A pause that is over in time is no fault."""
    scene.submit(scene.others)
    scene.until_waiting(scene.others)
    scene.strike()
    worker = scene.cluster.workers[scene.cell.hit]
    worker.stop()
    if scene.cell.workers > 1:  # the others work on meanwhile
        scene.agree()
    worker.go_on()
    scene.submit([VICTIM])
    scene.succeed(scene.everybody)


@fault("parted from its peers", "worker", deadline=1.0, workers=(3,), linked=True, hit=HIT)
def parted_from_peers(scene: Scene) -> None:
    """Nothing of the worker's links arrives. All have come, so who had not finished is what can be said."""
    links = [link for peer in (0, 2) for link in scene.links(1, peer)]
    for flow in (flow for link in links for flow in link.flows):
        flow.arm(Fault(Act.HOLD))
    scene.strike()
    scene.submit(scene.everybody)
    if scene.timeout:
        words = ("within 1.0 s", "all ranks have come", "had not finished")
        scene.hear(Code.DEADLINE_EXCEEDED, (), ranks=scene.everybody, words=words)
    else:
        scene.until_waiting(scene.everybody)
    scene.agree()
    for flow in (flow for link in links for flow in link.flows):
        flow.release()
    if not scene.timeout:
        scene.succeed(scene.everybody)
    scene.again()


@fault("parted from the coordinator", "worker", hit=HIT, grace=LOST_SECONDS, short=((True, 3),))
def parted_from_coordinator(scene: Scene) -> None:
    """For less than two heartbeats: nobody notices, for the coordinator has no part in what goes well."""
    scene.cluster.lines[scene.cell.hit].shut()
    scene.strike()
    for _ in range(20):
        scene.submit(scene.everybody)
        scene.succeed(scene.everybody)
    scene.cluster.lines[scene.cell.hit].open()
    scene.limit.until(lambda: scene.cluster.connected(scene.cell.hit), "the worker's way back to the coordinator")
    scene.agree()
    scene.submit(scene.everybody)
    scene.succeed(scene.everybody)


@fault(
    "parted from the coordinator for good", "worker", workers=(3,), hit=HIT, grace=LOST_SECONDS, orphans=((), (VICTIM,))
)
def lost_to_coordinator(scene: Scene) -> None:
    """After two heartbeats it is lost; its ranks hear so when its links end."""
    scene.submit(scene.others)
    scene.until_waiting(scene.others)
    scene.strike()
    scene.cluster.lines[1].shut()
    scene.hear(Code.UNAVAILABLE, within=LOST_SECONDS + AT_ONCE_SECONDS)
    scene.agree()
    scene.submit([VICTIM])
    scene.hear(Code.UNAVAILABLE, ranks=[VICTIM], note=False)
    scene.alike()
    scene.cluster.lines[1].open()
    scene.limit.until(lambda: scene.cluster.connected(1), "the worker's way back to the coordinator")
    scene.again()


@fault(
    "parted from everybody",
    "worker",
    deadline=1.0,
    without=False,
    workers=(3,),
    linked=True,
    hit=HIT,
    grace=LOST_SECONDS,
    orphans=((), (VICTIM,)),
)
def parted_from_all(scene: Scene) -> None:
    links = [link for peer in (0, 2) for link in scene.links(1, peer)]
    scene.strike()
    for flow in (flow for link in links for flow in link.flows):
        flow.arm(Fault(Act.HOLD))
    scene.cluster.lines[1].shut()
    scene.submit(scene.everybody)
    scene.hear(Code.DEADLINE_EXCEEDED, ranks=scene.others)
    scene.agree()
    scene.hear(Code.DEADLINE_EXCEEDED, lambda _: True, ranks=[VICTIM], note=False)
    for flow in (flow for link in links for flow in link.flows):
        flow.release()
    scene.cluster.lines[1].open()
    scene.limit.until(lambda: scene.cluster.connected(1), "the worker's way back to the coordinator")
    scene.again()


@fault("strangers send half a greeting, garbage, or nothing", "worker", short=((True, 1),))
def strangers(scene: Scene) -> None:
    """Whoever knocks without knowing how changes nothing for those who are in."""
    task = scene.cell.placement[VICTIM]
    scene.submit(scene.others)
    scene.until_waiting(scene.others)
    scene.strike()
    (told,) = scene.cluster.status(task, 2.0).workers
    host, _, port = told.link_address.rpartition(":")
    with contextlib.ExitStack() as guests:
        for words in (GARBAGE[:HELLO_BYTES], GARBAGE[: HELLO_BYTES // 2], b""):
            for kind, address in (
                (socket.SOCK_SEQPACKET, f"{scene.cluster.folder}/door-{task}.sock"),
                (socket.SOCK_STREAM, scene.cluster.addresses[task].removeprefix("unix:")),
                (socket.SOCK_STREAM, (host, int(port))),
            ):
                family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
                guest = guests.enter_context(socket.socket(family, kind))
                guest.connect(address)
                if words:
                    guest.send(words)
        scene.agree()
        scene.submit([VICTIM])
        scene.succeed(scene.everybody)
    scene.submit(scene.everybody)
    scene.succeed(scene.everybody)
    scene.again()
