"""The coordinator dies, stops, is doubled, or its connections to workers are spoilt."""

from __future__ import annotations

import time

from collectived_proto.errors import Code

from ..cell import VICTIM, fault
from ..history import AT_ONCE_SECONDS
from ..processes import Daemon
from ..proxy import Act, Fault
from ..scene import Scene

ATTEMPTS = 6  # of a worker to reach a coordinator that is away
BACK_SECONDS = 2.0  # after the restart of the coordinator its workers have found it
AWAY_SECONDS = 0.5  # the deadline of what is to end while the coordinator is away


def waiting(scene: Scene) -> None:
    scene.submit(scene.others)
    scene.until_waiting(scene.others)


def goes_on(scene: Scene) -> None:
    """The victim comes after all, and so does success."""
    scene.submit([VICTIM])
    scene.succeed(scene.everybody)


def back(scene: Scene) -> None:
    """The coordinator is started again, and all workers have found it."""
    scene.cluster.restart_coordinator(scene.limit)
    scene.limit.until(scene.cluster.all_connected, "all workers' way back to the coordinator")


@fault("SIGKILL while ranks wait", "coordinator", short=((True, 3),))
def killed(scene: Scene) -> None:
    """Nobody notices: running groups go on without it and after it."""
    waiting(scene)
    scene.strike()
    scene.cluster.coordinator.kill()
    scene.agree()
    goes_on(scene)
    scene.submit(scene.everybody)
    scene.succeed(scene.everybody)
    back(scene)
    scene.submit(scene.everybody)
    scene.succeed(scene.everybody)
    scene.again()


@fault("SIGKILL, and away for long", "coordinator", workers=(1,), given=False, cap=40.0)
def away(scene: Scene) -> None:
    """However long it was away, once it is there its workers find it soon."""
    waiting(scene)
    line = scene.cluster.lines[0]
    before = line.refused
    scene.strike()
    scene.cluster.coordinator.kill()
    goes_on(scene)
    scene.limit.until(lambda: line.refused >= before + ATTEMPTS, "attempts to reach it")
    scene.cluster.restart_coordinator(scene.limit)
    restarted = time.monotonic()
    scene.limit.until(scene.cluster.all_connected, "all workers' way back to the coordinator")
    took = time.monotonic() - restarted
    assert took <= BACK_SECONDS + scene.late, f"the workers were back {took:.2f} s after its restart"


@fault("SIGKILL, restarted before the deadline", "coordinator", deadline=4.0, without=False)
def killed_and_restarted(scene: Scene) -> None:
    """The verdict is that of the one that came back."""
    waiting(scene)
    scene.strike()
    scene.cluster.coordinator.kill()
    back(scene)
    scene.hear(Code.DEADLINE_EXCEEDED, words=("within 4.0 s", "rank 2"))
    scene.agree()
    scene.alike()
    scene.again()


@fault("SIGKILL, the deadline passes without it", "coordinator", deadline=AWAY_SECONDS, without=False)
def killed_before_deadline(scene: Scene) -> None:
    """Workers decide, all the same; whoever comes back adopts it."""
    waiting(scene)
    scene.strike()
    scene.cluster.coordinator.kill()
    scene.hear(Code.DEADLINE_EXCEEDED)
    scene.agree()
    scene.alike()
    back(scene)
    scene.submit([VICTIM])
    scene.hear(Code.DEADLINE_EXCEEDED, ranks=[VICTIM], note=False)
    scene.again()


@fault("SIGKILL, and a client is killed", "coordinator", short=((False, 1),))
def killed_with_client(scene: Scene) -> None:
    waiting(scene)
    scene.strike()
    scene.cluster.coordinator.kill()
    scene.victim.kill()
    scene.hear(Code.UNAVAILABLE, words=("rank 2",), within=AT_ONCE_SECONDS)
    scene.agree()
    back(scene)
    scene.alike()
    scene.replace(VICTIM)
    scene.again()


@fault("SIGKILL, and a client aborts", "coordinator")
def killed_and_aborted(scene: Scene) -> None:
    waiting(scene)
    scene.strike()
    scene.cluster.coordinator.kill()
    scene.victim.ask("abort", reason="nobody is in charge").value(scene.limit)
    scene.hear(Code.ABORTED, words=("rank 2", "nobody is in charge"), within=AT_ONCE_SECONDS)
    scene.agree()
    back(scene)
    scene.alike()
    scene.again()


@fault("SIGKILL, and ranks differ", "coordinator")
def killed_with_mismatch(scene: Scene) -> None:
    """Contracts are compared by workers: they need nobody to see that they differ."""
    scene.cluster.coordinator.kill()
    scene.strike()
    scene.submit(scene.others)
    scene.submit([VICTIM], count=10)
    scene.hear(Code.INVALID_ARGUMENT, lambda _: True, ranks=scene.everybody, within=2 * AT_ONCE_SECONDS)
    scene.agree()
    back(scene)
    scene.again()


@fault("SIGKILL while ranks join", "coordinator")
def killed_while_joining(scene: Scene) -> None:
    """A join that has begun is completed by the one that comes back."""
    joining = [scene.cluster.hire(task) for task in scene.cell.placement]
    for process in joining:
        process.ask("connect", worker=scene.cluster.addresses[process.worker]).value(scene.limit)
    name, size = f"{scene.group}-joining", scene.size
    answers = [p.ask("join", name=name, size=size, rank=rank) for rank, p in enumerate(joining) if rank != VICTIM]
    scene.until_forming(name, size - 1)
    scene.strike()
    scene.cluster.coordinator.kill()
    answers.append(joining[VICTIM].ask("join", name=name, size=size, rank=VICTIM))
    scene.agree()
    back(scene)
    generations = {answer.value(scene.limit)["generation"] for answer in answers}
    assert len(generations) == 1, f"the ranks are in generations {generations}"
    scene.submit(scene.everybody)
    scene.succeed(scene.everybody)
    for process in joining:
        process.ask("close").value(scene.limit)
        scene.cluster.dismiss(process)


@fault("SIGSTOP while ranks wait", "coordinator")
def stopped(scene: Scene) -> None:
    waiting(scene)
    scene.strike()
    scene.cluster.coordinator.stop()
    scene.agree()
    goes_on(scene)
    scene.cluster.coordinator.go_on()
    scene.submit(scene.everybody)
    scene.succeed(scene.everybody)
    scene.again()


@fault("SIGSTOP, the deadline passes without it", "coordinator", deadline=AWAY_SECONDS, without=False)
def stopped_before_deadline(scene: Scene) -> None:
    waiting(scene)
    scene.strike()
    scene.cluster.coordinator.stop()
    scene.hear(Code.DEADLINE_EXCEEDED)
    scene.agree()
    scene.cluster.coordinator.go_on()
    scene.alike()
    scene.submit([VICTIM])
    scene.hear(Code.DEADLINE_EXCEEDED, ranks=[VICTIM], note=False)
    scene.again()


@fault("its connections are reset", "coordinator", short=((False, 3),))
def reset(scene: Scene) -> None:
    waiting(scene)
    scene.strike()
    for line in scene.cluster.lines:
        for connection in line.connections:
            connection.cut()
    scene.agree()
    goes_on(scene)
    still_decides(scene)


@fault("half a message, then its connections close", "coordinator")
def half(scene: Scene) -> None:
    spoil(scene, Act.CLOSE)


@fault("garbage on its connections", "coordinator", short=((True, 1),))
def garbage(scene: Scene) -> None:
    spoil(scene, Act.GARBAGE)


def spoil(scene: Scene, act: Act) -> None:
    """The next bytes either way are spoilt; heartbeats and reports are such bytes."""
    waiting(scene)
    scene.strike()
    flows = [flow for line in scene.cluster.lines for flow in line.flows]
    for flow in flows:
        flow.arm(Fault(act))
    scene.limit.until(lambda: any(flow.faulted.is_set() for flow in flows), "the fault")
    scene.agree()
    goes_on(scene)
    still_decides(scene)


@fault("never reads what one worker says", "coordinator", deadline=8.0)
def never_reads(scene: Scene) -> None:
    """For less than two heartbeats."""
    waiting(scene)
    scene.strike()
    flows = scene.cluster.lines[scene.cell.placement[VICTIM]].flows
    for flow in flows:
        flow.arm(Fault(Act.HOLD))
    scene.agree()
    goes_on(scene)
    for flow in flows:
        flow.release()
    still_decides(scene)


def still_decides(scene: Scene) -> None:
    """All workers are back, and a client that is killed now is named by the coordinator."""
    scene.limit.until(scene.cluster.all_connected, "all workers' way back to the coordinator")
    scene.submit(scene.others)
    scene.until_waiting(scene.others)
    scene.victim.kill()
    scene.hear(Code.UNAVAILABLE, words=("rank 2",), note=False)
    deciders = {scene.ranks[rank].outcomes()[-1].decided_by for rank in scene.others}
    assert deciders == {"coordinator"}, f"although the coordinator is back, {sorted(deciders)} decided"
    scene.replace(VICTIM)
    scene.again()


@fault("a second one at its address", "coordinator", workers=(1,), without=False)
def second(scene: Scene) -> None:
    waiting(scene)
    scene.strike()
    rival = Daemon("coordinator", "--listen", f"unix:{scene.cluster.folder}/c.sock")
    scene.limit.until(lambda: not rival.alive, "the end of the second coordinator")
    assert rival.status == 1 and "in use" in "".join(rival.log), rival.log
    rival.close()
    scene.agree()
    goes_on(scene)


@fault("a later one takes its place", "coordinator", without=False)
def doubled(scene: Scene) -> None:
    """Workers obey the highest epoch; the earlier coordinator ends itself when it hears of the later."""
    cluster = scene.cluster
    waiting(scene)
    path = f"{cluster.folder}/later.sock"
    later = Daemon("coordinator", "--listen", f"unix:{path}")
    later.ready(scene.limit)
    scene.strike()
    try:
        cluster.lead_to(path)
        scene.limit.until(cluster.all_connected, "all workers' way to the later coordinator")
        scene.agree()
        cluster.lead_to("")
        scene.limit.until(lambda: not cluster.coordinator.alive, "the end of the earlier coordinator")
        assert cluster.coordinator.status == 1 and "later" in "".join(cluster.coordinator.log)
    finally:
        later.close()
    back(scene)
    goes_on(scene)
    scene.again()
