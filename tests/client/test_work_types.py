"""What type checkers say of works."""

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
    assert_type(group.all_reduce("sum", value), Any)


async def awaiting(group: cd.Group) -> None:
    assert_type(await group.all_reduce("sum", 1.0, async_op=True), float)
"""


def check(program: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(program)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_work_has_the_type_of_its_result(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    checked = check(program)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    program.write_text(PROGRAM + "    group.barrier(async_op=True).result().nothing\n    group.barrier(out=1)\n")
    assert check(program).stdout.count("error:") == 2, "it is looked at"
