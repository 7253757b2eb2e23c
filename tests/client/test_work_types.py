"""What type checkers say of results, and of works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
from typing import Any, assert_type

import collectived as cd


def body(group: cd.Group, value: dict[str, float], rows: list[int], flag: bool) -> None:
    work = group.all_reduce("sum", value, async_op=True)
    assert_type(work, cd.Work[dict[str, float]])
    assert_type(work.result(), dict[str, float])
    assert_type(work.wait(5), dict[str, float])
    assert_type(cd.wait([work, work]), list[dict[str, float]])
    assert_type(group.reduce("sum", value, 1, async_op=True), cd.Work[dict[str, float] | None])
    assert_type(group.broadcast(value, async_op=True), cd.Work[dict[str, float]])
    assert_type(group.broadcast(None, async_op=True), cd.Work[Any])
    assert_type(group.all_gather(rows, 1, async_op=True), cd.Work[list[int]])
    assert_type(group.gather(rows, async_op=True), cd.Work[list[int] | None])
    assert_type(group.scatter(rows, sizes=[1], async_op=True), cd.Work[Any])
    assert_type(group.reduce_scatter("max", rows, timeout=3, async_op=True), cd.Work[list[int]])
    assert_type(group.all_to_all(rows, out=rows, async_op=True), cd.Work[list[int]])
    assert_type(group.send(value, 1, async_op=True), cd.Work[None])
    assert_type(group.recv(1, 7, async_op=True), cd.Work[Any])
    assert_type(group.barrier(async_op=True), cd.Work[None])
    assert_type(group.all_reduce("sum", value, async_op=flag), Any)


def blocking(group: cd.Group, value: dict[str, float], rows: list[int], either: list[int] | None) -> None:
    assert_type(group.all_reduce("sum", value), dict[str, float])
    assert_type(group.all_reduce("sum", value, timeout=3, out=value), dict[str, float])
    assert_type(group.all_reduce("sum", 1), int)
    assert_type(group.reduce("sum", value, 1, async_op=False), dict[str, float] | None)
    assert_type(group.broadcast(value), dict[str, float])
    assert_type(group.broadcast(None), Any)
    assert_type(group.broadcast(either), list[int] | Any)
    assert_type(group.all_gather(rows, 1), list[int])
    assert_type(group.gather(rows), list[int] | None)
    assert_type(group.scatter(rows, sizes=[1]), Any)
    assert_type(group.reduce_scatter("max", rows), list[int])
    assert_type(group.all_to_all(rows, out=rows), list[int])
    group.barrier(timeout=3)


async def awaiting(group: cd.Group) -> None:
    assert_type(await group.all_reduce("sum", 1.0, async_op=True), float)
"""

WRONG = """
    group.barrier(async_op=True).result().nothing
    group.barrier(out=1)
    group.all_gather([1]).nothing
"""


def check(program: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(program)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_results_have_the_type_of_their_value_and_works_that_of_their_result(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    checked = check(program)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    program.write_text(PROGRAM + WRONG)
    assert check(program).stdout.count("error:") == 3, "it is looked at"
