"""`collectived.testing.local`: real daemons for users' own tests."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

import collectived as cd
from collectived.testing.daemon import Daemon

SUM = """
import collectived as cd
with cd.connect() as session, session.join() as group:
    print(group.rank, group.size, group.all_reduce("sum", group.rank), session.worker)
"""


@pytest.fixture(scope="module")
def job() -> Iterator[cd.testing.LocalJob]:
    with cd.testing.local(workers=2) as made:
        yield made


def test_a_program_with_many_descriptors_starts_daemons_too() -> None:
    """select() takes none from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"this process may have {hard} descriptors, of which it takes more than 1024")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        with cd.testing.local() as job:
            assert job.run(lambda group: group.all_reduce("sum", group.rank), ranks=2) == [1, 1]


def test_threads_are_ranks(job: cd.testing.LocalJob) -> None:
    assert job.run(lambda group: group.all_reduce("sum", group.rank), ranks=4) == [6] * 4
    assert job.run(lambda group: (group.rank, group.size)) == [(0, 2), (1, 2)]  # one per worker


def test_ranks_lie_in_blocks_on_the_workers(job: cd.testing.LocalJob) -> None:
    assert job.run(lambda group: group.members[group.rank].host, ranks=4) == ["host0", "host0", "host1", "host1"]


def test_the_first_failure_is_raised_and_the_others_are_noted(job: cd.testing.LocalJob) -> None:
    def body(group: cd.Group) -> None:
        if group.rank == 2:
            raise RuntimeError("loss is NaN")
        group.barrier()

    with pytest.raises(RuntimeError, match="loss is NaN") as error:
        job.run(body, ranks=4)
    note = error.value.__notes__[-1]
    assert note.startswith("4 of 4 ranks failed, the first one first:\n  rank 2: RuntimeError: loss is NaN")
    assert note.count("AbortedError") == 3


def test_a_rank_that_does_not_come_is_an_error(job: cd.testing.LocalJob) -> None:
    others_have_heard = threading.Event()

    def body(group: cd.Group) -> None:
        if group.rank == 0:
            assert others_have_heard.wait(30)
            return
        try:
            group.barrier()
        finally:
            others_have_heard.set()

    with pytest.raises(cd.errors.DeadlineExceededError) as error:
        job.run(body, ranks=2, timeout=2)
    assert error.value.missing[0].rank == 0


def test_processes_are_ranks(job: cd.testing.LocalJob) -> None:
    ended = job.run_program([sys.executable, "-c", SUM.replace(", session.worker", "")], ranks=4)
    assert [(one.returncode, one.stdout.strip(), one.stderr) for one in ended] == [
        (0, f"{rank} 4 6", "") for rank in range(4)
    ]


def test_processes_that_do_not_end_are_killed(job: cd.testing.LocalJob) -> None:
    sleeps_as_rank_1 = "import os, time; time.sleep(int(os.environ['RANK']) * 60)"
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of .* did not end within 3 s"):
        job.run_program([sys.executable, "-c", sleeps_as_rank_1], ranks=2, timeout=3)


def test_a_process_gets_torchruns_variables(job: cd.testing.LocalJob) -> None:
    said = job.environment(2, 4)
    assert (said["RANK"], said["LOCAL_RANK"], said["LOCAL_WORLD_SIZE"], said["GROUP_RANK"]) == ("2", "0", "2", "1")


def test_a_killed_worker_is_what_its_ranks_and_the_others_hear_of() -> None:
    through = threading.Event()

    def body(group: cd.Group) -> str:
        group.barrier()
        if group.rank == 0:
            assert through.wait(10)  # whoever is through first may kill before the other has heard that it is
            mortal.kill(1)
        through.set()
        try:
            group.barrier()
        except cd.errors.UnavailableError as error:
            return type(error).__name__
        return "nothing"

    with cd.testing.local(workers=2) as mortal:
        assert mortal.run(body) == ["UnavailableError"] * 2


def test_nothing_is_left_behind() -> None:
    with cd.testing.local() as job:
        folder = os.path.dirname(job.workers[0].removeprefix("unix:"))
        assert os.path.isdir(folder)
        processes = [daemon.process for daemon in (job._coordinator, *job._daemons)]
    assert not os.path.exists(folder)
    assert [process.returncode for process in processes] == [0, 0]


@pytest.mark.parametrize("workers", [0, 65, "two", True])
def test_a_number_that_is_none_is_refused(workers: object) -> None:
    with pytest.raises((ValueError, TypeError), match="workers"), cd.testing.local(workers):  # type: ignore[arg-type]
        pass


def test_a_daemon_that_cannot_start_says_why() -> None:
    daemon = Daemon(["worker", *["--task", "0", "--coordinator", "unix:c", "--folder", "f"], "--no-such-option"], "")
    with pytest.raises(cd.errors.UnavailableError, match="--no-such-option"):
        daemon.wait_ready(20)


def test_the_end_of_a_job_does_not_hide_what_the_block_raised() -> None:
    with pytest.raises(KeyError, match="mine") as error, cd.testing.local(timeout=60) as job:
        os.kill(job._daemons[0].process.pid, signal.SIGSTOP)  # it will not end in order
        raise KeyError("mine")
    assert "had to be killed" in error.value.__notes__[-1]


def test_a_job_that_does_not_serve_in_time_is_an_error() -> None:
    with (
        pytest.raises(cd.errors.UnavailableError, match="did not serve within 0.001 s"),
        cd.testing.local(timeout=0.001),
    ):
        pass
