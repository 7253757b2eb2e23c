"""What the launcher decides, without a process or a clock: numbers are seconds."""

from __future__ import annotations

import signal

from collectived_launcher.supervise import (
    Action,
    ClientEnded,
    DaemonEnded,
    Elapsed,
    Event,
    Finish,
    Phase,
    Policy,
    Restart,
    Send,
    Signalled,
    State,
    begin,
    decide,
    exit_status,
)


def play(policy: Policy, *story: tuple[float, Event]) -> tuple[State, list[list[Action]]]:
    """Three ranks and what happened to them: the last state, and the actions after each event."""
    state, told = begin(policy, range(3)), []
    for now, event in story:
        state, actions = decide(state, event, now)
        told.append(list(actions))
    return state, told


def test_a_job_whose_clients_all_end_well_is_finished_with_the_last() -> None:
    state, told = play(Policy(), (1, ClientEnded(0, 0)), (2, ClientEnded(2, 0)), (3, ClientEnded(1, 0)))
    assert told == [[], [], [Finish()]]
    assert exit_status(state) == 0


def test_a_rank_that_ended_well_before_another_fails_is_not_signalled() -> None:
    _, told = play(Policy(grace=10), (1, ClientEnded(0, 0)), (2, ClientEnded(1, 3)), (12, Elapsed()))
    assert told[-1] == [Send((2,), signal.SIGTERM)]


def test_after_the_first_failure_the_others_have_the_grace_and_nothing_is_done_to_them() -> None:
    state, told = play(Policy(grace=10), (1, ClientEnded(1, 3)), (10.9, Elapsed()))
    assert told == [[], []]
    assert (state.phase, state.deadline) == (Phase.GRACE, 11)


def test_a_second_failure_does_not_prolong_the_grace() -> None:
    state, _ = play(Policy(grace=10), (1, ClientEnded(1, 3)), (5, ClientEnded(0, 1)))
    assert state.deadline == 11
    assert state.first_failure == ClientEnded(1, 3)


def test_after_the_grace_comes_sigterm_and_then_sigkill() -> None:
    state, told = play(
        Policy(grace=10, kill_after=5),
        (1, ClientEnded(1, 3)),
        (11, Elapsed()),
        (15.9, Elapsed()),
        (16, Elapsed()),
        (17, ClientEnded(0, -signal.SIGKILL)),
        (18, ClientEnded(2, -signal.SIGKILL)),
    )
    assert told[1:] == [[Send((0, 2), signal.SIGTERM)], [], [Send((0, 2), signal.SIGKILL)], [], [Finish()]]
    assert state.first_failure == ClientEnded(1, 3)
    assert exit_status(state) == 1


def test_a_failed_client_is_started_again_as_often_as_allowed() -> None:
    state, told = play(Policy(max_restarts=2), *[(float(t), ClientEnded(1, 3)) for t in range(3)])
    assert told == [[Restart(1, 1)], [Restart(1, 2)], []]
    assert state.phase is Phase.GRACE


def test_restarts_are_counted_per_rank() -> None:
    _, told = play(Policy(max_restarts=1), (1, ClientEnded(1, 3)), (2, ClientEnded(2, 1)))
    assert told == [[Restart(1, 1)], [Restart(2, 1)]]


def test_a_restarted_client_that_ends_well_makes_a_job_that_ended_well() -> None:
    story: list[tuple[float, Event]] = [(1.0, ClientEnded(1, 3)), *[(2.0, ClientEnded(rank, 0)) for rank in range(3)]]
    state, told = play(Policy(max_restarts=1), *story)
    assert told[-1] == [Finish()]
    assert exit_status(state) == 0


def test_nobody_is_started_again_once_a_daemon_died() -> None:
    state, told = play(Policy(max_restarts=5), (1, DaemonEnded("worker 0", -9)), (2, ClientEnded(1, 1)))
    assert told == [[], []]
    assert state.phase is Phase.GRACE


def test_a_dead_daemon_fails_the_job_even_if_all_clients_end_well() -> None:
    story: list[tuple[float, Event]] = [
        (1.0, DaemonEnded("coordinator", -9)),
        *[(2.0, ClientEnded(rank, 0)) for rank in range(3)],
    ]
    state, told = play(Policy(), *story)
    assert told[-1] == [Finish()]
    assert exit_status(state) == 1
    assert state.first_failure == DaemonEnded("coordinator", -9)


def test_ctrl_c_is_forwarded_and_after_the_grace_the_rest_is_killed() -> None:
    state, told = play(
        Policy(grace=10), (1, Signalled(signal.SIGINT)), (2, ClientEnded(0, -signal.SIGINT)), (11, Elapsed())
    )
    assert told == [[Send((0, 1, 2), signal.SIGINT)], [], [Send((1, 2), signal.SIGKILL)]]
    assert state.first_failure is None
    assert exit_status(state) == 130


def test_the_second_ctrl_c_kills() -> None:
    _, told = play(Policy(), (1, Signalled(signal.SIGINT)), (2, Signalled(signal.SIGINT)))
    assert told[-1] == [Send((0, 1, 2), signal.SIGKILL)]


def test_sigterm_hangup_and_a_closed_output_end_the_clients_with_sigterm_and_fail() -> None:
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        state, told = play(Policy(), (1, Signalled(signum)))
        assert told == [[Send((0, 1, 2), signal.SIGTERM)]]
        assert exit_status(state) == 1


def test_a_client_that_fails_because_of_ctrl_c_is_not_started_again() -> None:
    _, told = play(Policy(max_restarts=3), (1, Signalled(signal.SIGINT)), (2, ClientEnded(0, 1)))
    assert told[-1] == []


def test_ctrl_c_during_the_grace_ends_the_others_at_once_and_keeps_the_failure() -> None:
    state, told = play(Policy(grace=10), (1, ClientEnded(1, 3)), (2, Signalled(signal.SIGINT)))
    assert told[-1] == [Send((0, 2), signal.SIGINT)]
    assert state.first_failure == ClientEnded(1, 3)
    assert exit_status(state) == 130


def test_a_signal_before_any_client_was_started_finishes() -> None:
    state, actions = decide(begin(Policy(), ()), Signalled(signal.SIGINT), 1)
    assert actions == (Finish(),)
    assert exit_status(state) == 130
