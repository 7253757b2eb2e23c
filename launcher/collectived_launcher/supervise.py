"""What to do when a client ends, a daemon dies or somebody presses Ctrl-C: events in, actions out.

    RUNNING ── a client fails ──► GRACE ── grace is over ──► ENDING ── kill_after is over ──► KILLED
       │                            │                          ▲  │                             ▲
       └────────── a signal ────────┴──────────────────────────┘  └────── a second signal ──────┘

In GRACE the other clients see their errors and end by themselves. ENDING: they have been told to end (SIGTERM, or the
signal that the launcher got). From every phase the job is over when no client is alive. No clock, no process in here.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Policy:
    """Seconds and counts that the user chose."""

    grace: float = 10.0  # from the first failure, or the signal, until the others are ended
    max_restarts: int = 0  # how often each failed client is started again
    kill_after: float = 5.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True, slots=True)
class ClientEnded:
    """`status` as in `Popen.returncode`: negative is the signal that killed it."""

    rank: int
    status: int


@dataclass(frozen=True, slots=True)
class DaemonEnded:
    name: str
    status: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher got this signal; SIGPIPE stands for "nobody reads what we write"."""

    signum: int


@dataclass(frozen=True, slots=True)
class Elapsed:
    """`State.deadline` has come, or the clock was looked at for another reason."""


Event = ClientEnded | DaemonEnded | Signalled | Elapsed


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
class Finish:
    """No client is left."""


Action = Restart | Send | Finish


class Phase(enum.Enum):
    RUNNING = "running"
    GRACE = "grace"
    ENDING = "ending"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class State:
    policy: Policy
    alive: frozenset[int]
    phase: Phase = Phase.RUNNING
    deadline: float | None = None  # when `Elapsed` is due
    restarts: dict[int, int] = field(default_factory=dict)
    first_failure: ClientEnded | DaemonEnded | None = None
    interrupted_by: int | None = None


def begin(policy: Policy, ranks: Iterable[int]) -> State:
    return State(policy, frozenset(ranks))


def decide(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """The next state, and what the launcher does about the event, in this order."""
    match event:
        case ClientEnded():
            return _client_ended(state, event, now)
        case DaemonEnded():  # running groups outlive a coordinator; a worker's clients see their errors by themselves
            return replace(state, first_failure=state.first_failure or event), ()
        case Signalled(signum):
            return _signalled(state, signum, now)
        case Elapsed():
            return _elapsed(state, now)


def exit_status(state: State) -> int:
    """What the launcher exits with once the job is over: 130 after Ctrl-C, 1 after a failure or another signal."""
    if state.interrupted_by is not None:
        return 130 if state.interrupted_by == signal.SIGINT else 1
    return 1 if state.first_failure is not None else 0


def _client_ended(state: State, event: ClientEnded, now: float) -> tuple[State, tuple[Action, ...]]:
    failed = event.status != 0
    count = state.restarts.get(event.rank, 0) + 1
    if failed and state.phase is Phase.RUNNING and state.first_failure is None and count <= state.policy.max_restarts:
        return replace(state, restarts={**state.restarts, event.rank: count}), (Restart(event.rank, count),)
    state = replace(state, alive=state.alive - {event.rank})
    if failed and state.interrupted_by is None:
        state = replace(state, first_failure=state.first_failure or event)
        if state.phase is Phase.RUNNING:
            state = replace(state, phase=Phase.GRACE, deadline=now + state.policy.grace)
    if state.alive:
        return state, ()
    return replace(state, deadline=None), (Finish(),)


def _signalled(state: State, signum: int, now: float) -> tuple[State, tuple[Action, ...]]:
    if state.interrupted_by is not None:
        return _kill(state)
    state = replace(state, interrupted_by=signum, phase=Phase.ENDING, deadline=now + state.policy.grace)
    return state, _send(state, signum if signum == signal.SIGINT else signal.SIGTERM)


def _elapsed(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    if state.deadline is None or now < state.deadline:
        return state, ()
    if state.phase is Phase.GRACE:
        state = replace(state, phase=Phase.ENDING, deadline=now + state.policy.kill_after)
        return state, _send(state, signal.SIGTERM)
    return _kill(state)


def _kill(state: State) -> tuple[State, tuple[Action, ...]]:
    return replace(state, phase=Phase.KILLED, deadline=None), _send(state, signal.SIGKILL)


def _send(state: State, signum: int) -> tuple[Action, ...]:
    return (Send(tuple(sorted(state.alive)), signum),) if state.alive else (Finish(),)
