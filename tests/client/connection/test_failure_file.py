"""What a client leaves for its launcher when an exception ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from collectived.connection.failure_file import describe_failure
from collectived.errors import AbortedError
from collectived_proto.types import Member, Verdict

GUILTY = Member(2, "/job:worker/task:1/device:CPU:0", 1, "b", 77)
VERDICT = Verdict("world", 1, 1, 10, "rank 2 aborted", 0, missing=(GUILTY,), members=(GUILTY, GUILTY, GUILTY))


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_an_exception_of_the_program_blames_nobody() -> None:
    found = describe_failure(raised(ValueError("loss is NaN")))
    assert found["error"].startswith("ValueError: loss is NaN (") and found["blamed"] == []
    assert found["traceback"][-1] == "ValueError: loss is NaN" and found["pid"] == os.getpid()


def test_an_error_of_a_collective_blames_whom_its_verdict_blames() -> None:
    found = describe_failure(raised(AbortedError("rank 2 aborted", verdict=VERDICT)))
    assert found["blamed"] == [[2, 1, 77]] and found["size"] == 3 and found["verdict"] == "rank 2 aborted"


def test_an_error_raised_from_that_of_a_collective_does_too() -> None:
    """As torch.distributed does it."""
    found = describe_failure(raised(RuntimeError("step failed"), AbortedError("rank 2 aborted", verdict=VERDICT)))
    assert found["blamed"] == [[2, 1, 77]]


def test_the_file_is_written_once_the_exception_is_not_caught_and_not_by_a_forked_child(tmp_path: Path) -> None:
    script = """
import os, sys
from collectived.connection import failure_file
failure_file.install()
failure_file.install()
if os.fork() == 0:
    raise KeyError("in the child")
os.wait()
assert not os.path.exists(os.environ["COLLECTIVED_FAILURE_FILE"])
raise ValueError("in the parent")
"""
    path = tmp_path / "failure.json"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "COLLECTIVED_FAILURE_FILE": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stderr.count("ValueError: in the parent") == 1
    assert json.loads(path.read_text())["error"] == "ValueError: in the parent (<string>:10)"
