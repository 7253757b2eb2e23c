"""The actions of the launcher when a client ends, a daemon dies or the user presses Ctrl-C: events in, actions out.

    RUNNING ── a client fails ──► GRACE ── grace is over ──► ENDING ── kill_after is over ──► KILLED
       │                            │                          ▲  │                             ▲
       └────────── a signal ────────┴──────────────────────────┘  └────── a second signal ──────┘

In GRACE the other clients see their errors and end by themselves. ENDING: they have been asked to end (SIGTERM, or the
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
from collectived_launcher.launch.restarts import DaemonRestartState


@dataclass(frozen=True, slots=True)
class Policy:
    """Seconds and counts that the user chose."""

    grace: float = 10.0  # from the first failure, or the signal, until the others are ended
    max_restarts: int = 0  # how often each failed client is started again
    kill_after: float = 5.0  # from SIGTERM to SIGKILL
    daemon_restarts: int = (
        restarts.DEFAULT_MAX_RESTARTS
    )  # how often each daemon is started again within `restarts.WINDOW`
    ready_timeout: float = 30.0  # from a daemon's start until it serves


@dataclass(frozen=True, slots=True)
class ClientEnded:
    """`status` as in `Popen.returncode`: negative is the signal that killed it."""

    rank: int
    status: int


@dataclass(frozen=True, slots=True)
class DaemonEnded:
    """A daemon ended unasked, with any status. `jitter` in [0, 1) shortens the pause before its restart."""

    name: str
    status: int
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class DaemonReady:
    """A daemon that was started again serves."""

    name: str


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """The launcher got this signal; SIGPIPE stands for a reader of its output that is gone."""

    signum: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """`JobState.next_deadline` has come, or the clock was looked at for another reason."""


Event = ClientEnded | DaemonEnded | DaemonReady | SignalReceived | TimerFired


@dataclass(frozen=True, slots=True)
class Restart:
    """Start this rank again; `count` is what its COLLECTIVED_RESTART says."""

    rank: int
    count: int


@dataclass(frozen=True, slots=True)
class SignalRanks:
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


Action = Restart | SignalRanks | StartDaemon | KillDaemon | Finish


class JobPhase(enum.Enum):
    RUNNING = "running"
    GRACE = "grace"
    ENDING = "ending"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class JobState:
    policy: Policy
    workers: Mapping[int, str]  # rank -> the daemon that serves it
    alive: frozenset[int]  # those in `held` too
    phase: JobPhase = JobPhase.RUNNING
    deadline: float | None = None  # when this phase is over
    restarts: dict[int, int] = field(default_factory=dict)
    pending_restarts: dict[int, int] = field(
        default_factory=dict
    )  # rank -> count: to be started again when its worker serves
    daemons: dict[str, DaemonRestartState] = field(default_factory=dict)  # those that have ended at least once
    first_failure: ClientEnded | DaemonEnded | None = None
    interrupted_by: int | None = None

    @property
    def next_deadline(self) -> float | None:
        """When `TimerFired` is due; None while nothing is."""
        times = [daemon.next_deadline for daemon in self.daemons.values()]
        first = min([math.inf if self.deadline is None else self.deadline, *times])
        return None if first == math.inf else first

    def get_restart_state(self, daemon: str) -> DaemonRestartState:
        return self.daemons.get(daemon, DaemonRestartState())

    def has_serving_worker(self, rank: int) -> bool:
        """Whether the worker of this rank does."""
        return self.get_restart_state(self.workers[rank]).is_serving


def make_initial_state(policy: Policy, workers: Mapping[int, str]) -> JobState:
    """All ranks are running, and all daemons serve."""
    return JobState(policy, workers, frozenset(workers))


def decide(state: JobState, event: Event, now: float) -> tuple[JobState, tuple[Action, ...]]:
    """The next state, and what the launcher does about the event, in this order."""
    match event:
        case ClientEnded():
            return _on_client_ended(state, event, now)
        case DaemonEnded():
            return _on_daemon_ended(state, event, now)
        case DaemonReady(name):
            return _on_daemon_ready(state, name)
        case SignalReceived(signum):
            return _on_signal(state, signum, now)
        case TimerFired():
            return _on_timer(state, now)


def exit_status(state: JobState) -> int:
    """The exit status of the launcher once the job is over: 130 if a signal ended it, 1 after a failure."""
    if state.interrupted_by is not None:
        return 1 if state.interrupted_by == signal.SIGPIPE else 130
    return 1 if state.first_failure is not None else 0


def _on_client_ended(state: JobState, event: ClientEnded, now: float) -> tuple[JobState, tuple[Action, ...]]:
    failed = event.status != 0
    count = state.restarts.get(event.rank, 0) + 1
    if failed and state.phase is JobPhase.RUNNING and count <= state.policy.max_restarts:
        state = replace(state, restarts={**state.restarts, event.rank: count})
        if state.has_serving_worker(event.rank):
            return state, (Restart(event.rank, count),)
        return replace(state, pending_restarts={**state.pending_restarts, event.rank: count}), ()
    state = replace(state, alive=state.alive - {event.rank})
    if failed and state.interrupted_by is None:
        state = _fail(state, event, now)
    return _finish_if_over(state)


def _on_daemon_ended(state: JobState, event: DaemonEnded, now: float) -> tuple[JobState, tuple[Action, ...]]:
    if state.phase in (JobPhase.RUNNING, JobPhase.GRACE):
        again = restarts.record_exit(
            state.get_restart_state(event.name), state.policy.daemon_restarts, event.jitter, now
        )
        if again is not None:
            return _set_restart_state(state, event.name, again), ()
    return _finish_if_over(_fail(state, event, now))


def _on_daemon_ready(state: JobState, name: str) -> tuple[JobState, tuple[Action, ...]]:
    state = _set_restart_state(state, name, restarts.record_ready(state.get_restart_state(name)))
    back = {rank: count for rank, count in state.pending_restarts.items() if state.has_serving_worker(rank)}
    held = {rank: count for rank, count in state.pending_restarts.items() if rank not in back}
    return replace(state, pending_restarts=held), tuple(Restart(rank, count) for rank, count in sorted(back.items()))


def _set_restart_state(state: JobState, name: str, daemon: DaemonRestartState) -> JobState:
    return replace(state, daemons={**state.daemons, name: daemon})


def _fail(state: JobState, event: ClientEnded | DaemonEnded, now: float) -> JobState:
    """The job has failed: clients that run have the grace to end, and none is started again."""
    state = replace(state, first_failure=state.first_failure or event)
    if state.phase is not JobPhase.RUNNING:
        return state
    return replace(_drop_pending_restarts(state), phase=JobPhase.GRACE, deadline=now + state.policy.grace)


def _drop_pending_restarts(state: JobState) -> JobState:
    """Clients that wait for their worker are not started any more."""
    return replace(state, alive=state.alive.difference(state.pending_restarts), pending_restarts={})


def _finish_if_over(state: JobState) -> tuple[JobState, tuple[Action, ...]]:
    return (state, ()) if state.alive else (replace(state, deadline=None), (Finish(),))


def _on_signal(state: JobState, signum: int, now: float) -> tuple[JobState, tuple[Action, ...]]:
    if state.interrupted_by is not None:
        return _kill(state)
    state = _begin_ending(replace(state, interrupted_by=signum), now + state.policy.grace)
    return state, _signal_all(state, signum if signum == signal.SIGINT else signal.SIGTERM)


def _on_timer(state: JobState, now: float) -> tuple[JobState, tuple[Action, ...]]:
    if state.deadline is None or now < state.deadline:
        return _check_daemons(state, now)
    if state.phase is JobPhase.GRACE:
        state = _begin_ending(state, now + state.policy.kill_after)
        return state, _signal_all(state, signal.SIGTERM)
    return _kill(state)


def _check_daemons(state: JobState, now: float) -> tuple[JobState, tuple[Action, ...]]:
    """Daemons whose pause is over, and those that were started again and are late."""
    actions: list[Action] = []
    for name, daemon in state.daemons.items():
        if daemon.restart_at is not None and daemon.restart_at <= now:
            state = _set_restart_state(state, name, restarts.record_restart(daemon, state.policy.ready_timeout, now))
            actions.append(StartDaemon(name))
        elif daemon.ready_deadline is not None and daemon.ready_deadline <= now:
            state = _set_restart_state(state, name, restarts.record_ready_timeout(daemon))
            actions.append(KillDaemon(name))
    return state, tuple(actions)


def _begin_ending(state: JobState, deadline: float) -> JobState:
    """From here on everything is taken down, and nothing is started again."""
    return replace(_drop_pending_restarts(state), phase=JobPhase.ENDING, deadline=deadline, daemons={})


def _kill(state: JobState) -> tuple[JobState, tuple[Action, ...]]:
    return replace(state, phase=JobPhase.KILLED, deadline=None), _signal_all(state, signal.SIGKILL)


def _signal_all(state: JobState, signum: int) -> tuple[Action, ...]:
    return (SignalRanks(tuple(sorted(state.alive)), signum),) if state.alive else (Finish(),)
