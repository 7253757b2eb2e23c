"""Runs the snippets of the documentation as two ranks, each on a worker of its own.

A snippet that imports collectived is a program: two processes run it, with the environment of `collectived launch
--workers 2`, or one that starts a job by itself. Any other sees `cd`, `np`, `session` and `group`. What rank 0 prints
stands in comments, behind each `print` or below it.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
from tests.e2e.conftest import Cluster

import collectived as cd

_PRINT = re.compile(r"^ *print\((?:(?!  # ).)*\)(?:  # (.*))?\n((?: *# .*\n)*)", re.MULTILINE)
_WITHIN = 150  # seconds; how quick a program is, no snippet promises


def printed(cluster: Cluster, source: str, name: str) -> list[str]:
    """The lines that rank 0 prints; raises what a snippet raises."""
    program = re.search(r"^(import|from) collectived", source, re.MULTILINE)
    if not program:
        return as_threads(cluster, source, name)
    return as_processes(cluster, source, 1 if "cd.testing.local(" in source else 2)  # a job of its own is one process


def expected(source: str) -> list[str]:
    """The lines that rank 0 is said to print."""
    lines: list[str] = []
    found = _PRINT.findall(source)
    assert source.count("print(") == len(found), f"a print in this is not in a line of its own:\n{source}"
    for behind, below in found:
        assert behind or below, f"a print in this does not say what it prints:\n{source}"
        lines += [behind] if behind else [line.strip().removeprefix("# ") for line in below.splitlines()]
    return lines


def as_threads(cluster: Cluster, source: str, name: str) -> list[str]:
    code = compile(source, f"{name}.py", "exec")

    def body(session: cd.Session, group: cd.Group) -> list[str]:
        lines: list[str] = []

        def say(*values: Any) -> None:
            lines.extend(" ".join(map(str, values)).splitlines())

        exec(code, {"cd": cd, "np": np, "session": session, "group": group, "print": say, "__name__": "snippet"})
        return lines

    lines: list[str] = cluster.run_sessions(2, body, "world")[0]
    return lines


def as_processes(cluster: Cluster, source: str, count: int) -> list[str]:
    with contextlib.ExitStack() as running:
        clients = [running.enter_context(cluster.client(rank, count, "world", source)) for rank in range(count)]
        for client in clients:
            running.callback(client.kill)
        said = [client.communicate(timeout=_WITHIN) for client in clients]
    for client, (_, errors) in zip(clients, said, strict=True):
        assert client.returncode == 0, errors
    return said[0][0].splitlines()
