"""What to do when a client ends, a daemon dies or somebody presses Ctrl-C: events in, actions out.

    RUNNING ── a client fails ──► GRACE ── grace is over ──► ENDING ── kill_after is over ──► KILLED
       │                            │                          ▲  │                             ▲
       └────────── a signal ────────┴──────────────────────────┘  └────── a second signal ──────┘

In GRACE the other clients see their errors and end by themselves. ENDING: they have been told to end (SIGTERM, or the
signal that the launcher got). From every phase the job is over when no client is alive.

A daemon that ends by itself is started again (`restarts`) until ENDING; only where it has used up its restarts is its
end a failure of the job. A client that is to be started again waits until its worker serves. No clock, no process in
here.
"""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from collectived_launcher.launch import restarts
from collectived_launcher.launch.restarts import Watched


@dataclass(frozen=True, slots=True)
class Policy:
    """Seconds and counts that the user chose."""

    grace: float = 10.0  # from the first failure, or the signal, until the others are ended
    max_restarts: int = 0  # how often each failed client is started again
    kill_after: float = 5.0  # from SIGTERM to SIGKILL
    daemon_restarts: int = restarts.MOST  # how often each daemon is started again within `restarts.WINDOW`
    ready_within: float = 30.0  # from a daemon's start until it serves


@dataclass(frozen=True, slots=True)
class ClientEnded:
    """`status` as in `Popen.returncode`: negative is the signal that killed it."""

    rank: int
    status: int


@dataclass(frozen=True, slots=True)
class DaemonEnded:
    """Not told to, whatever its status. `chance` in [0, 1) shortens the pause before its restart."""

    name: str
    status: int
    chance: float = 0.0


@dataclass(frozen=True, slots=True)
class DaemonReady:
    """A daemon that was started again serves."""

    name: str


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher got this signal; SIGPIPE stands for "nobody reads what we write"."""

    signum: int


@dataclass(frozen=True, slots=True)
class Elapsed:
    """`State.wakeup` has come, or the clock was looked at for another reason."""


Event = ClientEnded | DaemonEnded | DaemonReady | Signalled | Elapsed


@dataclass(frozen=True, slots=True)
class Restart:
    """Start this rank again; `count` is what its COLLECTIVED_RESTART says."""

    rank: int
    count: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send the signal to the process groups of these ranks."""

    ranks: tuple[int, ...]
    signum: int


@dataclass(frozen=True, slots=True)
class StartDaemon:
    """Start this daemon again, in the place of the one that ended."""

    name: str


@dataclass(frozen=True, slots=True)
class KillDaemon:
    """It was started again and does not come to serve."""

    name: str


@dataclass(frozen=True, slots=True)
class Finish:
    """No client is left."""


Action = Restart | Send | StartDaemon | KillDaemon | Finish


class Phase(enum.Enum):
    RUNNING = "running"
    GRACE = "grace"
    ENDING = "ending"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class State:
    policy: Policy
    workers: Mapping[int, str]  # rank -> the daemon that serves it
    alive: frozenset[int]  # those in `held` too
    phase: Phase = Phase.RUNNING
    deadline: float | None = None  # when this phase is over
    restarts: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)  # rank -> count: to be started again when its worker serves
    daemons: dict[str, Watched] = field(default_factory=dict)  # those that have ended at least once
    first_failure: ClientEnded | DaemonEnded | None = None
    interrupted_by: int | None = None

    @property
    def wakeup(self) -> float | None:
        """When `Elapsed` is due; None while nothing is."""
        times = [daemon.wakeup for daemon in self.daemons.values()]
        first = min([math.inf if self.deadline is None else self.deadline, *times])
        return None if first == math.inf else first

    def watched(self, daemon: str) -> Watched:
        return self.daemons.get(daemon, Watched())

    def serves(self, rank: int) -> bool:
        """Whether the worker of this rank does."""
        return self.watched(self.workers[rank]).serves


def begin(policy: Policy, workers: Mapping[int, str]) -> State:
    """All ranks are running, and all daemons serve."""
    return State(policy, workers, frozenset(workers))


def decide(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """The next state, and what the launcher does about the event, in this order."""
    match event:
        case ClientEnded():
            return _client_ended(state, event, now)
        case DaemonEnded():
            return _daemon_ended(state, event, now)
        case DaemonReady(name):
            return _daemon_ready(state, name)
        case Signalled(signum):
            return _signalled(state, signum, now)
        case Elapsed():
            return _elapsed(state, now)


def exit_status(state: State) -> int:
    """What the launcher exits with once the job is over: 130 if it was told to end, 1 after a failure."""
    if state.interrupted_by is not None:
        return 1 if state.interrupted_by == signal.SIGPIPE else 130
    return 1 if state.first_failure is not None else 0


def _client_ended(state: State, event: ClientEnded, now: float) -> tuple[State, tuple[Action, ...]]:
    failed = event.status != 0
    count = state.restarts.get(event.rank, 0) + 1
    if failed and state.phase is Phase.RUNNING and count <= state.policy.max_restarts:
        state = replace(state, restarts={**state.restarts, event.rank: count})
        if state.serves(event.rank):
            return state, (Restart(event.rank, count),)
        return replace(state, held={**state.held, event.rank: count}), ()
    state = replace(state, alive=state.alive - {event.rank})
    if failed and state.interrupted_by is None:
        state = _fail(state, event, now)
    return _finish_if_over(state)


def _daemon_ended(state: State, event: DaemonEnded, now: float) -> tuple[State, tuple[Action, ...]]:
    if state.phase in (Phase.RUNNING, Phase.GRACE):
        again = restarts.ended(state.watched(event.name), state.policy.daemon_restarts, event.chance, now)
        if again is not None:
            return _watch(state, event.name, again), ()
    return _finish_if_over(_fail(state, event, now))


def _daemon_ready(state: State, name: str) -> tuple[State, tuple[Action, ...]]:
    state = _watch(state, name, restarts.ready(state.watched(name)))
    back = {rank: count for rank, count in state.held.items() if state.serves(rank)}
    held = {rank: count for rank, count in state.held.items() if rank not in back}
    return replace(state, held=held), tuple(Restart(rank, count) for rank, count in sorted(back.items()))


def _watch(state: State, name: str, daemon: Watched) -> State:
    return replace(state, daemons={**state.daemons, name: daemon})


def _fail(state: State, event: ClientEnded | DaemonEnded, now: float) -> State:
    """The job has failed: clients that run have the grace to end, and none is started again."""
    state = replace(state, first_failure=state.first_failure or event)
    if state.phase is not Phase.RUNNING:
        return state
    return replace(_release(state), phase=Phase.GRACE, deadline=now + state.policy.grace)


def _release(state: State) -> State:
    """Clients that wait for their worker are not started any more."""
    return replace(state, alive=state.alive.difference(state.held), held={})


def _finish_if_over(state: State) -> tuple[State, tuple[Action, ...]]:
    return (state, ()) if state.alive else (replace(state, deadline=None), (Finish(),))


def _signalled(state: State, signum: int, now: float) -> tuple[State, tuple[Action, ...]]:
    if state.interrupted_by is not None:
        return _kill(state)
    state = _end(replace(state, interrupted_by=signum), now + state.policy.grace)
    return state, _send(state, signum if signum == signal.SIGINT else signal.SIGTERM)


def _elapsed(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    if state.deadline is None or now < state.deadline:
        return _tend(state, now)
    if state.phase is Phase.GRACE:
        state = _end(state, now + state.policy.kill_after)
        return state, _send(state, signal.SIGTERM)
    return _kill(state)


def _tend(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    """Daemons whose pause is over, and those that were started again and are late."""
    actions: list[Action] = []
    for name, daemon in state.daemons.items():
        if daemon.due is not None and daemon.due <= now:
            state = _watch(state, name, restarts.started(daemon, state.policy.ready_within, now))
            actions.append(StartDaemon(name))
        elif daemon.ready_by is not None and daemon.ready_by <= now:
            state = _watch(state, name, restarts.late(daemon))
            actions.append(KillDaemon(name))
    return state, tuple(actions)


def _end(state: State, deadline: float) -> State:
    """From here on everything is taken down, and nothing is started again."""
    return replace(_release(state), phase=Phase.ENDING, deadline=deadline, daemons={})


def _kill(state: State) -> tuple[State, tuple[Action, ...]]:
    return replace(state, phase=Phase.KILLED, deadline=None), _send(state, signal.SIGKILL)


def _send(state: State, signum: int) -> tuple[Action, ...]:
    return (Send(tuple(sorted(state.alive)), signum),) if state.alive else (Finish(),)
