"""What the launcher decides, without a process or a clock: numbers are seconds."""

from __future__ import annotations

import signal

import pytest

from collectived_launcher.launch.job_state import (
    Action,
    ClientEnded,
    DaemonEnded,
    DaemonReady,
    Event,
    Finish,
    JobPhase,
    JobState,
    KillDaemon,
    Policy,
    Restart,
    SignalRanks,
    SignalReceived,
    StartDaemon,
    TimerFired,
    decide,
    exit_status,
    make_initial_state,
)

WORKERS = {0: "worker 0", 1: "worker 0", 2: "worker 1"}


def play(policy: Policy, *story: tuple[float, Event]) -> tuple[JobState, list[list[Action]]]:
    """Three ranks and what happened to them: the last state, and the actions after each event."""
    state, told = make_initial_state(policy, WORKERS), []
    for now, event in story:
        state, actions = decide(state, event, now)
        told.append(list(actions))
    return state, told


def test_a_job_whose_clients_all_end_well_is_finished_with_the_last() -> None:
    state, told = play(Policy(), (1, ClientEnded(0, 0)), (2, ClientEnded(2, 0)), (3, ClientEnded(1, 0)))
    assert told == [[], [], [Finish()]]
    assert exit_status(state) == 0


def test_a_rank_that_ended_well_before_another_fails_is_not_signalled() -> None:
    _, told = play(Policy(grace=10), (1, ClientEnded(0, 0)), (2, ClientEnded(1, 3)), (12, TimerFired()))
    assert told[-1] == [SignalRanks((2,), signal.SIGTERM)]


def test_after_the_first_failure_the_others_have_the_grace_and_nothing_is_done_to_them() -> None:
    state, told = play(Policy(grace=10), (1, ClientEnded(1, 3)), (10.9, TimerFired()))
    assert told == [[], []]
    assert (state.phase, state.deadline) == (JobPhase.GRACE, 11)


def test_a_second_failure_does_not_prolong_the_grace() -> None:
    state, _ = play(Policy(grace=10), (1, ClientEnded(1, 3)), (5, ClientEnded(0, 1)))
    assert state.deadline == 11
    assert state.first_failure == ClientEnded(1, 3)


def test_after_the_grace_comes_sigterm_and_then_sigkill() -> None:
    state, told = play(
        Policy(grace=10, kill_after=5),
        (1, ClientEnded(1, 3)),
        (11, TimerFired()),
        (15.9, TimerFired()),
        (16, TimerFired()),
        (17, ClientEnded(0, -signal.SIGKILL)),
        (18, ClientEnded(2, -signal.SIGKILL)),
    )
    assert told[1:] == [
        [SignalRanks((0, 2), signal.SIGTERM)],
        [],
        [SignalRanks((0, 2), signal.SIGKILL)],
        [],
        [Finish()],
    ]
    assert state.first_failure == ClientEnded(1, 3)
    assert exit_status(state) == 1


def test_a_failed_client_is_started_again_as_often_as_allowed() -> None:
    state, told = play(Policy(max_restarts=2), *[(float(t), ClientEnded(1, 3)) for t in range(3)])
    assert told == [[Restart(1, 1)], [Restart(1, 2)], []]
    assert state.phase is JobPhase.GRACE


def test_restarts_are_counted_per_rank() -> None:
    _, told = play(Policy(max_restarts=1), (1, ClientEnded(1, 3)), (2, ClientEnded(2, 1)))
    assert told == [[Restart(1, 1)], [Restart(2, 1)]]


def test_a_restarted_client_that_ends_well_makes_a_job_that_ended_well() -> None:
    story: list[tuple[float, Event]] = [(1.0, ClientEnded(1, 3)), *[(2.0, ClientEnded(rank, 0)) for rank in range(3)]]
    state, told = play(Policy(max_restarts=1), *story)
    assert told[-1] == [Finish()]
    assert exit_status(state) == 0


def test_a_daemon_that_ended_is_started_again_after_its_pause_and_the_job_ends_well() -> None:
    state, told = play(
        Policy(),
        (1, DaemonEnded("coordinator", -9)),
        (1.1, TimerFired()),
        (1.2, TimerFired()),
        (2, DaemonReady("coordinator")),
        *[(3.0, ClientEnded(rank, 0)) for rank in range(3)],
    )
    assert told == [[], [], [StartDaemon("coordinator")], [], [], [], [Finish()]]
    assert exit_status(state) == 0


def test_the_launcher_wakes_when_the_first_pause_is_over() -> None:
    state, _ = play(Policy(), (1, DaemonEnded("coordinator", -9)), (1.05, DaemonEnded("worker 1", -9, jitter=0.5)))
    assert state.next_deadline == 1.2
    state, actions = decide(state, TimerFired(), 1.21)
    assert set(actions) == {StartDaemon("coordinator"), StartDaemon("worker 1")}
    state, _ = decide(state, DaemonReady("coordinator"), 2)
    assert state.next_deadline == 1.21 + 30
    state, _ = decide(state, DaemonReady("worker 1"), 2)
    assert state.next_deadline is None


def test_a_daemon_that_is_started_again_and_does_not_come_to_serve_is_killed_once_and_tried_again() -> None:
    _, told = play(
        Policy(ready_timeout=30),
        (1, DaemonEnded("worker 0", 1)),
        (2, TimerFired()),
        (31.9, TimerFired()),
        (32, TimerFired()),
        (33, TimerFired()),
        (34, DaemonEnded("worker 0", -9)),
        (35, TimerFired()),
    )
    assert told == [[], [StartDaemon("worker 0")], [], [KillDaemon("worker 0")], [], [], [StartDaemon("worker 0")]]


def test_a_client_is_started_again_only_when_its_worker_serves() -> None:
    state, told = play(
        Policy(max_restarts=1),
        (1, DaemonEnded("worker 0", -9)),
        (1.01, ClientEnded(1, 1)),
        (1.02, ClientEnded(2, 1)),
        (1.03, ClientEnded(0, 1)),
        (1.5, TimerFired()),
        (2, DaemonReady("worker 0")),
    )
    assert told[1:4] == [[], [Restart(2, 1)], []]
    assert told[4:] == [[StartDaemon("worker 0")], [Restart(0, 1), Restart(1, 1)]]
    assert state.alive == {0, 1, 2}


def test_the_coordinator_is_nobody_whom_a_client_waits_for() -> None:
    _, told = play(Policy(max_restarts=1), (1, DaemonEnded("coordinator", -9)), (1.1, ClientEnded(0, 1)))
    assert told[-1] == [Restart(0, 1)]


def test_a_client_that_waits_for_its_worker_is_nobody_once_the_job_has_failed() -> None:
    story: list[tuple[float, Event]] = [
        (1, DaemonEnded("worker 0", -9)),
        (1.1, ClientEnded(0, 1)),  # is to be started again
        (1.2, ClientEnded(2, 1)),
        (1.3, ClientEnded(2, 1)),  # and now it has failed
        (1.4, DaemonReady("worker 0")),
        (1.5, ClientEnded(1, 0)),
    ]
    state, told = play(Policy(max_restarts=1), *story)
    assert state.phase is JobPhase.GRACE
    assert told == [[], [], [Restart(2, 1)], [], [], [Finish()]]


def test_during_the_grace_daemons_are_started_again_and_afterwards_not() -> None:
    grace = Policy(grace=10)
    _, told = play(grace, (1, ClientEnded(0, 1)), (2, DaemonEnded("coordinator", -9)), (3, TimerFired()))
    assert told[-1] == [StartDaemon("coordinator")]
    state, told = play(
        grace,
        (1, ClientEnded(0, 1)),
        (10.9, DaemonEnded("coordinator", -9)),
        (11, TimerFired()),
        (11.5, TimerFired()),
        (12, DaemonEnded("worker 0", -9)),
        (13, TimerFired()),
    )
    assert told[1:] == [[], [SignalRanks((1, 2), signal.SIGTERM)], [], [], []]
    assert state.next_deadline == state.deadline


def test_after_ctrl_c_nothing_is_started_again() -> None:
    _, told = play(
        Policy(max_restarts=3),
        (1, DaemonEnded("worker 0", -9)),
        (1.1, ClientEnded(0, 1)),
        (1.1, SignalReceived(signal.SIGINT)),
        (2, TimerFired()),
        (3, DaemonReady("worker 0")),
        (3, DaemonEnded("coordinator", -9)),
        (4, TimerFired()),
    )
    assert told == [[], [], [SignalRanks((1, 2), signal.SIGINT)], [], [], [], []]


def test_ctrl_c_while_all_clients_wait_for_their_worker_finishes() -> None:
    _, told = play(
        Policy(max_restarts=1),
        (1, ClientEnded(2, 0)),
        (1, DaemonEnded("worker 0", -9)),
        (1.1, ClientEnded(0, 1)),
        (1.1, ClientEnded(1, 1)),
        (1.1, SignalReceived(signal.SIGINT)),
    )
    assert told[-1] == [Finish()]


@pytest.mark.parametrize("allowed", [0, 2])
def test_a_daemon_that_has_used_up_its_restarts_fails_the_job(allowed: int) -> None:
    policy = Policy(grace=10, max_restarts=5, daemon_restarts=allowed)
    state = make_initial_state(policy, WORKERS)
    for restart in range(allowed):
        state, actions = decide(state, DaemonEnded("worker 0", -9), restart)
        state, actions = decide(state, TimerFired(), restart + 0.5)
        assert actions == (StartDaemon("worker 0"),) and state.phase is JobPhase.RUNNING
    state, actions = decide(state, DaemonEnded("worker 0", -9), 5)
    assert (actions, state.phase, state.deadline) == ((), JobPhase.GRACE, 15)
    state, actions = decide(state, ClientEnded(0, 1), 6)
    assert actions == ()  # nobody is started again
    assert state.first_failure == DaemonEnded("worker 0", -9)
    assert decide(state, TimerFired(), 15)[1] == (SignalRanks((1, 2), signal.SIGTERM),)
    assert exit_status(state) == 1


def test_daemons_are_counted_each_for_itself() -> None:
    state, _ = play(
        Policy(daemon_restarts=1),
        *[(1.0, DaemonEnded(name, -9)) for name in ("coordinator", "worker 0", "worker 1")],
    )
    assert state.phase is JobPhase.RUNNING


def test_a_daemon_without_restarts_fails_the_job_even_if_all_clients_end_well() -> None:
    story: list[tuple[float, Event]] = [
        (1.0, DaemonEnded("coordinator", -9)),
        *[(2.0, ClientEnded(rank, 0)) for rank in range(3)],
    ]
    state, told = play(Policy(daemon_restarts=0), *story)
    assert told[-1] == [Finish()]
    assert exit_status(state) == 1
    assert state.first_failure == DaemonEnded("coordinator", -9)


def test_where_all_clients_wait_for_a_worker_that_does_not_come_back_the_job_is_over() -> None:
    _, told = play(
        Policy(max_restarts=1, daemon_restarts=1),
        (1, ClientEnded(2, 0)),
        (1, DaemonEnded("worker 0", -9)),
        (1.1, ClientEnded(0, 1)),
        (1.1, ClientEnded(1, 1)),
        (2, TimerFired()),
        (3, DaemonEnded("worker 0", 1)),
    )
    assert told[-2:] == [[StartDaemon("worker 0")], [Finish()]]


def test_ctrl_c_is_forwarded_and_after_the_grace_the_rest_is_killed() -> None:
    state, told = play(
        Policy(grace=10), (1, SignalReceived(signal.SIGINT)), (2, ClientEnded(0, -signal.SIGINT)), (11, TimerFired())
    )
    assert told == [[SignalRanks((0, 1, 2), signal.SIGINT)], [], [SignalRanks((1, 2), signal.SIGKILL)]]
    assert state.first_failure is None
    assert exit_status(state) == 130


def test_the_second_ctrl_c_kills() -> None:
    _, told = play(Policy(), (1, SignalReceived(signal.SIGINT)), (2, SignalReceived(signal.SIGINT)))
    assert told[-1] == [SignalRanks((0, 1, 2), signal.SIGKILL)]


def test_sigterm_and_hangup_interrupt_and_a_closed_output_fails_and_all_end_the_clients_with_sigterm() -> None:
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        state, told = play(Policy(), (1, SignalReceived(signum)))
        assert told == [[SignalRanks((0, 1, 2), signal.SIGTERM)]]
        assert exit_status(state) == (1 if signum == signal.SIGPIPE else 130)


def test_a_client_that_fails_because_of_ctrl_c_is_not_started_again() -> None:
    _, told = play(Policy(max_restarts=3), (1, SignalReceived(signal.SIGINT)), (2, ClientEnded(0, 1)))
    assert told[-1] == []


def test_ctrl_c_during_the_grace_ends_the_others_at_once_and_keeps_the_failure() -> None:
    state, told = play(Policy(grace=10), (1, ClientEnded(1, 3)), (2, SignalReceived(signal.SIGINT)))
    assert told[-1] == [SignalRanks((0, 2), signal.SIGINT)]
    assert state.first_failure == ClientEnded(1, 3)
    assert exit_status(state) == 130


def test_a_signal_before_any_client_was_started_finishes() -> None:
    state, actions = decide(make_initial_state(Policy(), {}), SignalReceived(signal.SIGINT), 1)
    assert actions == (Finish(),)
    assert exit_status(state) == 130
