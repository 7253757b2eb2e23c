"""`collectived bench`: what it refuses, where it measures, what it prints, and what is left of it: nothing."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.docs.blocks import claimed
from tests.docs.stage import plain
from tests.e2e.launcher.conftest import PATIENCE, Place
from tests.forked_launch import run_launcher

from collectived_launcher.__main__ import run

pytestmark = pytest.mark.timeout(120)  # several of these start jobs more than once, each some seconds
COMMAND = [sys.executable, "-m", "collectived_launcher"]
WITHIN = 55.0  # seconds for one run of the command
COMMANDS, TABLE = claimed(__file__)
QUICK = ["-e", "1K", "-f", "16", "-n", "5", "-w", "1"]
ROW_KEYS = {
    *("size_bytes", "count", "iterations", "p50_seconds", "p99_seconds", "mean_seconds"),
    *("algorithm_bandwidth", "bus_bandwidth", "errors"),
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("sort", "'sort' is not one of 'all_reduce', 'reduce'"),
        ("--min-bytes some", "'some' is not a size: expected a number with B, KiB, MiB, GiB or TiB"),
        ("--max-bytes 0", "'0' is nothing: expected at least 1"),
        ("--step-bytes -4", "'-4' is not a size"),
        ("-b 1M -e 1K", "--min-bytes 1048576 is more than --max-bytes 1024: expected sizes that grow"),
        ("--factor 1", "1 is not in the range x>=2"),
        ("--factor 2 --step-bytes 4", "--step-bytes and --factor were both given"),
        ("--step-bytes 4", "--step-bytes 4 gives 16777216 sizes: expected at most 1000"),
        ("--iterations 0", "0 is not in the range"),
        ("--warmup -1", "-1 is not in the range"),
        ("--dtype float8", "'float8' is not one of"),
        ("--reduce-op average-of", "unknown reduce op 'average-of': expected one of sum, mean"),
        ("broadcast --reduce-op sum", "broadcast reduces nothing; expected all_reduce, reduce or reduce_scatter"),
        ("--reduce-op bor", "--reduce-op bor --dtype float32: expected integers"),
        ("--reduce-op max --dtype complex64", "expected values that have an order"),
        ("--dtype bool", "--reduce-op sum --dtype bool: expected numbers"),
        ("--root 1", "all_reduce has no root; expected reduce, broadcast, gather or scatter"),
        ("reduce --root 6 --workers 2 --clients 3", "--root 6: expected a rank, 0 to 5"),
        ("--memory mine", "'mine' is not one of"),
        ("--async 33", "33 is not in the range 0<=x<=32"),
        ("--timeout nan", "'nan' is not a time"),
        ("--clients 0", "0 is not in the range"),
        ("--worker unix:/x --workers 1", "expected one of them"),
        ("--job a --worker unix:/x", "expected one of them"),
        ("--worker nowhere", "'nowhere' is not an address: expected unix:/path or host:port"),
        ("--plot a.jpg", "'a.jpg': expected a file name that ends with .png, .svg or .pdf"),
        ("--plot /no/such/a.png", "there is no folder '/no/such'"),
        ("barrier --plot a.png", "a barrier has no sizes"),
        ("--no-such-option", "--no-such-option"),
    ],
)
def test_wrong_use_names_the_value_and_what_is_expected(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run(["bench", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_worker_that_does_not_answer_is_exit_status_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run(["bench", "--worker", f"unix:{tmp_path}/none.sock"]) == 3
    assert "UNREACHABLE: no worker answers at unix:" in capsys.readouterr().err


def test_a_job_that_does_not_run_is_exit_status_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run(["bench", "--job", "a"]) == 3
    assert "UNREACHABLE: you have no job 'a' running on this host; running jobs: none" in capsys.readouterr().err


def bench(place: Place, *arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *before, "bench", *arguments]
    return run_launcher(command, {**place.environment, "COLUMNS": "80"}, timeout=WITHIN)


def test_a_new_job_gives_a_table_and_a_picture(place: Place, tmp_path: Path) -> None:
    picture = tmp_path / "found.png"
    done = bench(place, "all_reduce", "--workers", "2", "--clients", "1", *QUICK, "--plot", str(picture))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].rstrip() == "all_reduce: 2 ranks on 2 workers, shared memory, arrays of the worker"
    assert lines[1].split("  ")[0] == "size B" and "busbw GB/s" in lines[1]
    _, title, head, *_, below, average = TABLE.text.splitlines()
    assert re.fullmatch(r"all_reduce: 2 ranks on 1 worker, shared memory, arrays of the worker", title)
    assert (lines[1].split(), lines[-2].strip(), plain(lines[-1])) == (head.split(), below, plain(average))
    rows = [line.split() for line in lines if re.match(r" *[0-9]", line)]
    assert [(row[0], row[1], row[2], row[3], row[4], row[5], row[-1]) for row in rows] == [
        (str(size), str(size // 4), "float32", "sum", "-", "5", "0") for size in (4, 64, 1024)
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("line", COMMANDS.text.splitlines())
def test_the_commands_of_the_page_measure(place: Place, tmp_path: Path, line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    assert program == "collectived"
    words += ["-e", "64K", "-n", "5", "-w", "1"]  # the last of two options counts: the page's own sizes take minutes
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = run_launcher([*COMMAND, *words], {**place.environment, "PATH": path}, tmp_path, timeout=WITHIN)
    assert (done.returncode, done.stderr) == (0, "")
    assert "algbw GB/s" in done.stdout or '"algorithm_bandwidth"' in done.stdout
    assert ("--plot" in words) == bool(list(tmp_path.iterdir()))


def shape_of(told: dict[str, Any]) -> None:
    assert set(told) == {"conditions", "complete", "errors", "rows", "failures"}
    assert told["complete"] is True and told["errors"] == 0 and told["failures"] == []
    assert all(set(row) == ROW_KEYS for row in told["rows"])


def test_json_has_seconds_and_bytes(place: Place) -> None:
    done = bench(
        place, "reduce_scatter", *QUICK, "-o", "MAX", "-d", "int16", "--memory", "own", "--async", "3", "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    shape_of(told)
    conditions = told["conditions"]
    expected = {
        "operation": "reduce_scatter",
        "dtype": "int16",
        "reduce_op": "max",
        "root": None,
        "ranks": 2,
        "workers": 1,
        "hosts": 1,
        "transport": "shared memory",
        "memory": "own",
        "in_flight": 3,
        "warmup": 1,
        "checked": True,
        "time": "slowest rank",
    }
    assert {key: conditions[key] for key in expected} == expected
    assert set(conditions) == {*expected, "cores", "version"}
    for row, size in zip(told["rows"], (4, 64, 1024), strict=True):
        assert row["size_bytes"] == size and row["count"] == size // 4 and row["errors"] == 0
        assert row["algorithm_bandwidth"] == pytest.approx(size / row["p50_seconds"])
        assert row["bus_bandwidth"] == pytest.approx(row["algorithm_bandwidth"] / 2)


def test_as_ranks_of_a_launch_it_measures_with_those(place: Place) -> None:
    before = ("launch", "--clients", "3", "--", *COMMAND)
    done = bench(place, "all_gather", *QUICK, "--json", before=before)
    assert (done.returncode, done.stderr) == (0, "")
    opening, *lines = done.stdout.splitlines()
    assert opening.startswith("1 worker × 3 clients = 3 ranks")
    assert all(line.startswith("[rank 0] ") for line in lines)
    told = json.loads("\n".join(line.removeprefix("[rank 0] ") for line in lines))
    shape_of(told)
    assert told["conditions"]["ranks"] == 3
    assert run_usage(place, "--clients", "2") == 2


def run_usage(place: Place, *arguments: str) -> int:
    """As a rank that is told how many there are to be."""
    place.environment |= {"COLLECTIVED_WORKER": "unix:/none", "RANK": "0", "WORLD_SIZE": "1"}
    done = bench(place, *arguments)
    assert "this is rank 0 of a job" in done.stderr
    return done.returncode


STAYS = """
import collectived as cd

with cd.connect() as session, session.join() as group:
    print("in", flush=True)
    session.join("end", group.size + 1)
"""


def test_a_job_that_runs_is_joined_and_goes_on(place: Place) -> None:
    job = place.run_in_background([*COMMAND, "launch", "--workers", "2", "--", sys.executable, "-c", STAYS])
    place.lines_with(job, "in", 2)
    done = bench(place, "barrier", "-n", "5", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    shape_of(told)
    assert (told["conditions"]["ranks"], told["conditions"]["workers"]) == (4, 2)
    (row,) = told["rows"]
    assert row["size_bytes"] == 0 and row["algorithm_bandwidth"] is None and row["errors"] is None
    (folder,) = (Path(place.folder) / "collectived").glob("*/")
    chosen = bench(place, "reduce", "--worker", f"unix:{folder}/worker-1.sock", "--clients", "3", *QUICK, "--json")
    assert (chosen.returncode, chosen.stderr) == (0, "")
    assert json.loads(chosen.stdout)["conditions"]["ranks"] == 3
    assert job.poll() is None
    job.send_signal(signal.SIGINT)
    assert job.wait(PATIENCE) == 130


@contextmanager
def at_a_terminal(place: Place, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command with standard error at a terminal, of which the other end is given."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "bench", *arguments],
        env={**place.environment, "COLUMNS": "100", "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()
            os.close(ours)


def read_until(terminal: int, pattern: str) -> str:
    """What the terminal shows up to a pattern, or up to its end where that is ''."""
    seen, deadline = b"", time.monotonic() + WITHIN
    while not pattern or not re.search(pattern, seen.decode(errors="replace")):
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, seen.decode(errors="replace")
        try:
            seen += os.read(terminal, 4096)
        except OSError:  # EIO: nobody has the other end any more
            assert not pattern, seen.decode(errors="replace")
            break
    return seen.decode(errors="replace")


LONG = ["all_reduce", "-b", "4", "-e", "16", "-n", "1000000"]


def test_a_terminal_shows_how_far_it_is_and_ctrl_c_leaves_nothing(place: Place) -> None:
    with at_a_terminal(place, *LONG) as (process, terminal):
        read_until(terminal, r"all_reduce 4 B × 1000000")
        process.send_signal(signal.SIGINT)
        said = read_until(terminal, "")
        assert process.wait(PATIENCE) == 130
        assert "Traceback" not in said and "Error" not in said, said


def test_a_lost_rank_is_told_once_and_what_was_measured_is_shown(place: Place) -> None:
    with at_a_terminal(place, *LONG, "--clients", "3", "--json") as (process, terminal):
        read_until(terminal, r"× 1000000")
        pid = max(place.having(b"collectived.bench"))
        os.kill(pid, signal.SIGKILL)
        said = read_until(terminal, "")
        assert process.stdout is not None
        told = json.loads(process.stdout.read())
        assert process.wait(PATIENCE) == 1
    assert said.count("UnavailableError") == 1, said
    assert told["complete"] is False and told["rows"] == []
    (failure,) = told["failures"]
    assert failure["error"].startswith("UnavailableError") and len(failure["ranks"]) == 2
