"""The three bindings over the real libnccl and the GPU of this machine; and the same facts over fake ones.

Two ranks share the GPU, each a process of its own: NCCL takes them for two hosts (NCCL_HOSTID) and connects them over
the loopback. Whatever hangs is killed after `LIMIT_SECONDS`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.gpu.conftest import real_cuda
from tests.runtime.device.nccl.device_facts import RUNS, an_abort_behind_a_kernel_that_hangs

from collectived_runtime.device.nccl.binding import BINDINGS

ROOT = Path(__file__).parents[4]
LIMIT_SECONDS = 45
STAND_INS = ("stand-in", "stand-in that blocks")
RUN_OF = {fact.__name__: tuple(other.__name__ for other in run) for run in RUNS for fact in run}

pytestmark = pytest.mark.timeout(2 * LIMIT_SECONDS)


@functools.cache
def played(binding: str, titles: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both ranks say of the facts."""
    ends = socket.socketpair()
    ranks = []
    for rank, end in enumerate(ends):
        command = [sys.executable, "-m", "tests.runtime.device.nccl.run_device_facts", binding, str(rank)]
        told = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
        ranks.append(
            subprocess.Popen(
                [*command, str(end.fileno()), *titles],
                cwd=ROOT,
                env={**os.environ, **told},
                pass_fds=[end.fileno()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        end.close()
    said = []
    for process in ranks:
        try:
            said.append(process.communicate(timeout=LIMIT_SECONDS))
        except subprocess.TimeoutExpired:
            for other in ranks:
                other.kill()
            said.append(process.communicate())
    for process in ranks:
        process.wait()
    found: list[dict[str, Any]] = []
    for process, (out, err) in zip(ranks, said, strict=True):
        wrong = f"it ended with {process.returncode} (-9: killed, for it hung); it said:\n{out}\n{err}"
        found.append(dict.fromkeys(titles, {"wrong": wrong, "notes": []}))
        with contextlib.suppress(IndexError, json.JSONDecodeError):
            found[-1] = json.loads(out.splitlines()[-1])
            for one in found[-1].values():
                if isinstance(one, dict) and one["wrong"]:
                    one["wrong"] += f"\nNCCL said:\n{out}\n{err}"
    return found[0], found[1]


@pytest.mark.parametrize("title", RUN_OF)
@pytest.mark.parametrize("binding", [*STAND_INS, *BINDINGS])
def test_a_binding_on_a_gpu(binding: str, title: str) -> None:
    if binding in BINDINGS:
        real_cuda()
    elif title == an_abort_behind_a_kernel_that_hangs.__name__:
        pytest.skip("a stand-in hangs where a test wants it: tests/e2e/gpu/test_nccl_between_workers.py")
    for rank, found in enumerate(played(binding, RUN_OF[title])):
        if "missing" in found:
            pytest.skip(found["missing"])
        assert title in found, f"rank {rank} has not come so far: {found}"
        for note in found[title]["notes"]:
            print(f"{binding}, rank {rank}: {note}")
        assert not found[title]["wrong"], f"rank {rank}: {found[title]['wrong']}"
