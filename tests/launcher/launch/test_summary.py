"""The summary of a job begins with the rank that failed by itself, whoever ended first."""

from __future__ import annotations

import pytest

from collectived_launcher.launch.summary import (
    ClientReport,
    ProcessFailure,
    find_root_cause,
    format_summary,
    read_reports,
)

OWN = ClientReport("ValueError: loss is NaN (train.py:88)", ("Traceback", "ValueError: loss is NaN"))


def blames(*ranks: int) -> ClientReport:
    return ClientReport("AbortedError: rank 2 aborted", (), ranks, "rank 2 aborted")


def failure(rank: int, signum: int | None = None) -> ProcessFailure:
    return ProcessFailure(f"rank {rank} (pid {rank + 10})", "exit status 1", ("last words",), signum, rank)


def summarize(failures: list[ProcessFailure], reports: dict[int, ClientReport]) -> list[str]:
    return list(format_summary(failures, {}, reports, failure))


@pytest.mark.parametrize(
    ("ended", "reports", "root"),
    [
        ([0, 1, 2], {0: blames(2), 1: blames(2), 2: OWN}, 2),
        ([0, 1], {0: blames(2), 1: blames(2)}, 2),  # it hangs, or was killed
        ([0, 1, 2], {0: blames(1), 1: blames(2), 2: OWN}, 2),  # through two groups
        ([0, 2], {0: blames(0, 2), 2: blames(0, 2)}, 0),  # two differ
        ([1, 0], {0: blames(1), 1: blames(0)}, 1),
        ([3, 0], {0: blames(2, 3)}, 3),
        ([1, 2], {2: OWN}, 2),
        ([1, 2], {}, None),
    ],
)
def test_the_root_cause_is_the_rank_that_no_verdict_explains(
    ended: list[int], reports: dict[int, ClientReport], root: int | None
) -> None:
    assert find_root_cause(ended, reports) == root


def test_the_rank_that_raised_comes_first_with_its_traceback_and_its_victims_take_one_line() -> None:
    said = summarize([failure(0), failure(1), failure(2), failure(3, 15)], {0: blames(2), 1: blames(2), 2: OWN})
    assert said == [
        "collectived: root cause: rank 2 (pid 12): exit status 1: ValueError: loss is NaN (train.py:88)",
        "    Traceback",
        "    ValueError: loss is NaN",
        "collectived: failed in consequence: ranks 0, 1: exit status 1; "
        "rank 3: exit status 1, after the launcher had sent SIGTERM",
    ]


def test_a_rank_that_said_nothing_is_told_with_the_verdict_that_blames_it() -> None:
    said = summarize([failure(0)], {0: blames(2)})
    assert said[:2] == [
        "collectived: root cause: rank 2 (pid 12): exit status 1: rank 2 aborted",
        "    last words",
    ]


def test_of_a_rank_that_the_launcher_has_ended_the_cause_comes_before_its_end() -> None:
    said = list(format_summary([failure(0), failure(2, 15)], {}, {0: blames(2)}, lambda rank: failure(rank, 15)))
    end = "exit status 1, after the launcher had sent SIGTERM"
    assert said[0] == f"collectived: root cause: rank 2 (pid 12): rank 2 aborted; its end: {end}"


def test_where_nobody_says_why_the_first_to_end_comes_first() -> None:
    said = summarize([failure(1), failure(0)], {})
    assert said == [
        "collectived: first failure: rank 1 (pid 11): exit status 1",
        "    last words",
        "collectived: then: rank 0 (pid 10): exit status 1",
    ]


def test_a_daemon_that_is_lost_for_good_comes_before_its_clients() -> None:
    daemon = ProcessFailure("worker 0 (pid 5)", "killed by signal 9 (SIGKILL)")
    said = summarize([daemon, failure(0)], {0: blames(1)})
    assert said == [
        "collectived: first failure: worker 0 (pid 5): killed by signal 9 (SIGKILL)",
        "collectived: failed in consequence: rank 0: exit status 1",
    ]


def test_members_of_a_part_of_the_job_are_known_by_their_processes() -> None:
    """A rank of a split group has another number than in the job, and a shell another process than its program."""
    clients = {0: (0, 100), 1: (0, 101), 2: (1, 100), 3: (1, 103)}
    answers = {
        0: {"pid": 100, "error": "e", "traceback": [], "verdict": "v", "blamed": [[1, 1, 203]], "size": 2},
        1: {"pid": 101, "error": "e", "traceback": [], "verdict": "v", "blamed": [[0, 1, 100]], "size": 2},
        3: {"pid": 203, "error": "e\x1b[2J\nforged", "traceback": ["\x1b"], "verdict": "", "blamed": [], "size": 0},
    }
    reports = read_reports(answers, clients)
    assert reports[0].blamed == (3,) and reports[1].blamed == (2,)
    assert reports[3].error == "e\N{REPLACEMENT CHARACTER}[2J forged"


@pytest.mark.parametrize("answer", [None, 3, [], {}, {"pid": 1, "blamed": [[1]]}, {"blamed": 3, "size": 1}])
def test_what_no_client_writes_is_no_report(answer: object) -> None:
    assert read_reports({0: answer}, {0: (0, 1)}) == {}
