"""A client is late, stops, dies, or misbehaves."""

from __future__ import annotations

import itertools

from tests.drills.cells import contracts

from collectived_proto.errors import Code

from ..cell import VICTIM, fault
from ..history import AT_ONCE_SECONDS
from ..scene import Scene

STATUS = 3  # with which a client exits
UNREAD = 20
PACKS = 256  # of a collective whose outcome is asked for again and again: so many messages answer each time


def wait_for_victim(scene: Scene) -> None:
    """Everybody but the victim has submitted, and the workers show it."""
    scene.submit(scene.others)
    scene.until_waiting(scene.others)
    scene.strike()


@fault("submits too late", "client", deadline=0.5, without=False, short=((True, 1),))
def too_late(scene: Scene) -> None:
    wait_for_victim(scene)
    scene.hear(Code.DEADLINE_EXCEEDED, words=("within 0.5 s", "rank 2", "rank.py"))
    scene.agree()
    scene.submit([VICTIM])
    scene.hear(Code.DEADLINE_EXCEEDED, ranks=[VICTIM], note=False)
    scene.alike(scene.everybody)
    scene.again()


@fault("any of them straggle: exactly these are named", "client", deadline=0.3, without=False)
def straggle(scene: Scene) -> None:
    """Every set of ranks is late once, but for all and none; whoever comes late hears the same."""
    for count in range(1, scene.size):
        for late in itertools.combinations(scene.everybody, count):
            waiting = [rank for rank in scene.everybody if rank not in late]
            scene.submit(waiting)
            scene.strike()
            scene.hear(Code.DEADLINE_EXCEEDED, late, ranks=waiting)
            scene.submit(late)
            scene.hear(Code.DEADLINE_EXCEEDED, late, ranks=late, note=False)
            scene.again()


@fault("stalls before it submits", "client", given=False, short=((False, 3),))
def stalls(scene: Scene) -> None:
    wait_for_victim(scene)
    scene.until_warned("rank 2", "has not come", "rank.py")
    scene.agree()
    scene.submit([VICTIM])
    scene.succeed(scene.everybody)
    scene.agree()


@fault("SIGSTOP before it submits", "client", deadline=0.5, short=((True, 3),))
def stopped(scene: Scene) -> None:
    wait_for_victim(scene)
    scene.victim.stop()
    if scene.timeout:
        scene.hear(Code.DEADLINE_EXCEEDED, words=("within 0.5 s", "rank 2"))
        scene.agree()
        scene.victim.go_on()
        scene.submit([VICTIM])
        scene.hear(Code.DEADLINE_EXCEEDED, ranks=[VICTIM], note=False)
        scene.again()
    else:
        scene.until_warned("rank 2", "has not come")
        scene.agree()
        scene.victim.go_on()
        scene.submit([VICTIM])
        scene.succeed(scene.everybody)


@fault("SIGSTOP after it has submitted", "client")
def stopped_inside(scene: Scene) -> None:
    """The others do not need it any more; it finds its result when it goes on."""
    scene.submit([0])
    scene.submit([VICTIM], "start", lazy=True)
    scene.until_waiting([0, VICTIM])
    scene.strike()
    scene.victim.stop()
    scene.submit([rank for rank in scene.others if rank])
    scene.succeed(scene.others)
    scene.victim.go_on()
    scene.ask([VICTIM], "collect")
    scene.succeed([VICTIM])


@fault("aborts while others wait", "client", short=((False, 1),))
def aborts(scene: Scene) -> None:
    wait_for_victim(scene)
    scene.victim.ask("abort", reason="loss is NaN").value(scene.limit)
    scene.hear(Code.ABORTED, words=("rank 2", "aborted the group: loss is NaN"), within=AT_ONCE_SECONDS)
    scene.alike()
    scene.again()


@fault("aborts what it waits in", "client")
def aborts_itself(scene: Scene) -> None:
    arrived = [1, VICTIM]
    scene.submit(arrived)
    scene.until_waiting(arrived)
    scene.strike()
    scene.victim.ask("abort", now=True, reason="changed my mind").value(scene.limit)
    scene.hear(Code.ABORTED, ranks=[1], words=("rank 2", "changed my mind"), within=AT_ONCE_SECONDS)
    scene.submit([0])
    scene.hear(Code.ABORTED, ranks=[0], note=False)
    scene.alike([0, 1])


@fault("raises in the group's block", "client")
def raises(scene: Scene) -> None:
    wait_for_victim(scene)
    scene.victim.ask("fail", text="out of data").value(scene.limit)
    scene.hear(Code.ABORTED, words=("rank 2", "ValueError: out of data (rank.py:"), within=AT_ONCE_SECONDS)
    scene.alike()
    scene.again()


@fault("leaves while others wait", "client")
def leaves(scene: Scene) -> None:
    wait_for_victim(scene)
    scene.victim.ask("leave").value(scene.limit)
    scene.hear(Code.ABORTED, words=("rank 2", "left the group"), within=AT_ONCE_SECONDS)
    scene.alike()
    scene.again()


@fault("leaves while others are in any collective", "client", deadline=2.0, without=False)
def leaves_any(scene: Scene) -> None:
    """Whoever has nothing to wait for may have returned, and hears of it at the next call."""
    for collective in contracts.COLLECTIVES:
        scene.ask(scene.others, "call", call=contracts.usual(collective), timeout=scene.timeout, waits=False)
        scene.strike()
        scene.victim.ask("leave").value(scene.limit)
        first = scene.outcomes(scene.others)
        returned = [rank for rank, outcome in first.items() if outcome.code is Code.OK]
        scene.ask(returned, "call", call="barrier(options)", timeout=scene.timeout)
        then = {**first, **scene.outcomes(returned)}
        for rank, outcome in then.items():
            assert outcome.verdict == "ABORTED missing [2]", f"{collective}, rank {rank}: {outcome.verdict}"
        scene.tell(max(outcome.at for outcome in then.values()) - scene.struck_at, then[0])
        scene.again()


@fault("SIGKILL before it submits", "client", short=((False, 3),))
def killed(scene: Scene) -> None:
    wait_for_victim(scene)
    scene.victim.kill()
    scene.hear(Code.UNAVAILABLE, words=("rank 2", f"pid {scene.victim.pid}"), within=AT_ONCE_SECONDS)
    scene.agree()
    scene.alike()
    scene.replace(VICTIM)
    scene.again()


@fault("SIGKILL after it has submitted", "client", short=((True, 3),))
def killed_inside(scene: Scene) -> None:
    """What it had fully submitted completes; the next does not."""
    scene.submit([0, VICTIM])
    scene.until_waiting([0, VICTIM])
    scene.strike()
    scene.victim.kill()
    scene.victim.gone()
    scene.submit([rank for rank in scene.others if rank])
    scene.succeed(scene.others)
    scene.submit(scene.others)
    scene.hear(Code.UNAVAILABLE, words=("rank 2",))
    scene.alike()
    scene.replace(VICTIM)
    scene.again()


@fault("SIGKILL after it has submitted, and others never come", "client", deadline=1.0, without=False)
def killed_inside_in_vain(scene: Scene) -> None:
    """What it had submitted could still complete, so the deadline ends it, and names who has not come."""
    scene.submit([0, VICTIM])
    scene.until_waiting([0, VICTIM])
    scene.strike()
    scene.victim.kill()
    scene.victim.gone()
    absent = [rank for rank in scene.others if rank]
    scene.hear(Code.DEADLINE_EXCEEDED, absent, ranks=[0])
    scene.agree()
    scene.submit(absent)
    scene.hear(Code.DEADLINE_EXCEEDED, absent, ranks=absent, note=False)
    scene.replace(VICTIM)
    scene.again()


@fault("exits while others wait", "client")
def exits(scene: Scene) -> None:
    wait_for_victim(scene)
    scene.victim.ask("exit", status=STATUS)
    scene.hear(Code.ABORTED, words=("rank 2", "left the group"), within=AT_ONCE_SECONDS)
    has_exited(scene)
    scene.alike()
    scene.replace(VICTIM)
    scene.again()


@fault("exits after it has submitted", "client")
def exits_inside(scene: Scene) -> None:
    """What it had fully submitted completes, and it ends; the next does not."""
    scene.submit([0])
    scene.submit([VICTIM], "start")
    scene.until_waiting([0, VICTIM])
    scene.strike()
    scene.victim.ask("exit", status=STATUS)
    scene.submit([rank for rank in scene.others if rank])
    scene.succeed(scene.others)
    has_exited(scene)
    scene.submit(scene.others)
    scene.hear(Code.ABORTED, words=("rank 2", "left the group"))
    scene.alike()
    scene.replace(VICTIM)
    scene.again()


def has_exited(scene: Scene) -> None:
    scene.limit.until(lambda: scene.victim.status is not None, "the end of the process")
    assert scene.victim.status == STATUS
    scene.victim.gone()


@fault("drops its sockets", "client", short=((False, 1),))
def drops(scene: Scene) -> None:
    wait_for_victim(scene)
    scene.victim.ask("drop_sockets", now=True).value(scene.limit)
    scene.hear(Code.UNAVAILABLE, words=("rank 2",), within=AT_ONCE_SECONDS)
    scene.alike()
    scene.replace(VICTIM)
    scene.again()


@fault("sends half a message", "client")
def half(scene: Scene) -> None:
    misbehave(scene, "send_half_a_ring")


@fault("sends garbage", "client", short=((True, 3),))
def garbage(scene: Scene) -> None:
    misbehave(scene, "send_garbage")


def misbehave(scene: Scene, how: str) -> None:
    wait_for_victim(scene)
    scene.victim.ask(how, now=True).value(scene.limit)
    scene.hear(Code.UNAVAILABLE, words=("rank 2", "it sent something malformed"), within=AT_ONCE_SECONDS)
    scene.alike()
    scene.agree()
    scene.replace(VICTIM)
    scene.again()


@fault("never reads, and asks without end", "client", workers=(3,), short=((False, 3),))
def never_reads(scene: Scene) -> None:
    """Ranks in a segment ask their worker for nothing that it answers: this is too large, and submitted to it."""
    packs = f"broadcast([np.ones(2100)] * {PACKS}, 0, options.merge(cd.CommunicationOptions(bytes_per_pack=16800)))"
    scene.ask(scene.everybody, "call", call=packs, timeout=scene.timeout)
    scene.succeed(scene.everybody)
    wait_for_victim(scene)
    scene.victim.ask("never_read", now=True)
    scene.agree()
    scene.hear(Code.UNAVAILABLE, words=("rank 2", "messages unread"))
    scene.alike()
    scene.agree()
    scene.replace(VICTIM)
    scene.again()


@fault("never reads twenty results", "client")
def reads_late(scene: Scene) -> None:
    """Whoever does not look at its results keeps nobody else from theirs."""
    for _ in range(UNREAD):
        scene.submit([VICTIM], "start", lazy=True)
    scene.strike()
    for _ in range(UNREAD):
        scene.submit(scene.others)
        scene.succeed(scene.others)
    scene.ask([VICTIM], "collect")
    scene.succeed([VICTIM])
