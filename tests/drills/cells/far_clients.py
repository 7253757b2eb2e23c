"""Clients that reach their workers over TCP, by gRPC alone: the same faults end in the same way."""

from __future__ import annotations

from tests.drills.cells import clients, workers

from collectived_proto.errors import Code

from ..cell import VICTIM, fault
from ..history import AT_ONCE_SECONDS
from ..scene import Scene

TARGET = "client over gRPC"
LARGE = 1 << 18  # elements: 2 MiB, more than a stream takes that nobody reads
UNREAD = 8

fault("submits too late", TARGET, deadline=0.5, without=False, remote=True)(clients.too_late)
fault("stalls before it submits", TARGET, given=False, remote=True)(clients.stalls)
fault("SIGSTOP before it submits", TARGET, deadline=0.5, remote=True)(clients.stopped)
fault("SIGSTOP after it has submitted", TARGET, remote=True)(clients.stopped_inside)
fault("aborts while others wait", TARGET, remote=True)(clients.aborts)
fault("aborts what it waits in", TARGET, remote=True)(clients.aborts_itself)
fault("leaves while others wait", TARGET, remote=True)(clients.leaves)
fault("SIGKILL before it submits", TARGET, remote=True, short=((True, 3),))(clients.killed)
fault("SIGKILL after it has submitted", TARGET, remote=True)(clients.killed_inside)
fault("drops its connections", TARGET, remote=True, short=((False, 3),))(clients.drops)
fault("never reads twenty results", TARGET, remote=True)(clients.reads_late)
fault("its worker: SIGKILL while others wait", TARGET, remote=True, hit=workers.HIT, orphans=workers.ORPHANS)(
    workers.killed
)
fault(
    "its worker: SIGSTOP while others wait",
    TARGET,
    remote=True,
    deadline=1.0,
    hit=workers.HIT,
    orphans=workers.ORPHANS,
    grace=workers.LOST_SECONDS,
    cap=40.0,
)(workers.stopped)


@fault("never reads large results", TARGET, remote=True)
def never_reads(scene: Scene) -> None:
    """It stands still while results that no buffer holds wait for it: nobody else does."""
    for _ in range(UNREAD):
        scene.submit([VICTIM], "start", count=LARGE, lazy=True)
    scene.until_submitted(VICTIM, UNREAD)
    scene.victim.stop()
    scene.strike()
    for _ in range(UNREAD):
        scene.submit(scene.others, count=LARGE)
        scene.succeed(scene.others)
    scene.agree()
    scene.victim.go_on()
    scene.ask([VICTIM], "collect")
    scene.succeed([VICTIM])
    scene.again()


@fault("differs from the others", TARGET, remote=True, short=((True, 1),))
def differs(scene: Scene) -> None:
    scene.strike()
    scene.submit(scene.others)
    scene.submit([VICTIM], count=10)
    words = ("rank 2 differs: ",)
    scene.hear(Code.INVALID_ARGUMENT, ranks=scene.everybody, words=words, within=2 * AT_ONCE_SECONDS)
    scene.agree()
    scene.submit(scene.everybody)
    scene.succeed(scene.everybody)
