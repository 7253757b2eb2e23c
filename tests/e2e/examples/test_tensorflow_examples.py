"""The seeds' programs with `import collectived as tf`, run by `collectived launch`, and what they print."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.forked_launch import run_launcher

ROOT = Path(__file__).parents[3]
STEPS, PER_REPLICA = 60, 16
DEPRECATED = "DeprecationWarning: CollectiveHints is deprecated: use CommunicationOptions"


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """A user's environment with a runtime directory of its own, which is empty afterwards."""
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as folder:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        yield {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": folder, "OPENBLAS_NUM_THREADS": "1"}
        assert os.listdir(folder) == []


def launched(program: str, environment: dict[str, str]) -> tuple[list[str], str]:
    """The lines that an example prints, sorted, and its standard error; started as its own text says."""
    (line,) = re.findall(rf"collectived launch .*{program}\.py", (ROOT / f"examples/seeds/{program}.py").read_text())
    command = [sys.executable, "-m", "collectived_launcher", *line.split()[1:]]
    done = run_launcher(command, environment, ROOT, 50)
    assert done.returncode == 0, done.stderr + done.stdout
    return sorted(done.stdout.splitlines()[1:]), done.stderr


def trained(replicas: int) -> tuple[str, str]:
    """Weights and bias of the same descent in one process, as the examples print them."""
    weights, bias = np.zeros((3, 1)), np.zeros(1)
    for step in range(STEPS):
        x = np.concatenate(
            [np.random.default_rng([step, replica]).standard_normal((PER_REPLICA, 3)) for replica in range(replicas)]
        )
        errors = (x @ (weights - [[2.0], [-1.0], [0.5]]) + bias - 0.25) * 2 / len(x)
        weights, bias = weights - 0.1 * (x.T @ errors), bias - 0.1 * errors.sum(axis=0)
    return str(np.round(weights.ravel(), 6)), f"{bias[0]:.6f}"


def test_hints_as_in_r2_3(environment: dict[str, str]) -> None:
    lines, said = launched("hints", environment)
    weights, bias = trained(replicas=2)
    assert lines == [f"[rank {rank}] replica {rank} of 2: weights {weights} bias {bias}" for rank in range(2)]
    assert said.count(DEPRECATED) == 2 and len(said.splitlines()) == 4  # and the line that calls it, on both ranks


def test_options_as_from_r2_4_on(environment: dict[str, str]) -> None:
    lines, said = launched("options", environment)
    weights, bias = trained(replicas=2)
    assert lines == [f"[rank {rank}] replica {rank} of 2: weights {weights} bias {bias}" for rank in range(2)]
    (line,) = said.splitlines()
    assert line.endswith("is on CPU devices: the hint NCCL falls back to RING")


def test_cross_device_operations_of_a_strategy(environment: dict[str, str]) -> None:
    lines, said = launched("cross_device", environment)
    weights, bias = trained(replicas=3)
    for kind, line in zip(["HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice"], lines, strict=True):
        assert line.startswith(f"[rank 0] {kind}: weights {weights} bias {bias} loss ")
        assert float(line.rpartition(" ")[2]) < 1e-9
    lines = said.splitlines()
    assert lines and all(line.endswith("is on CPU devices: the hint NCCL falls back to RING") for line in lines)


def test_one_client_on_the_devices_of_two_workers(environment: dict[str, str]) -> None:
    lines, said = launched("multi_worker", environment)
    assert lines == [
        "[rank 0] 4 devices, each float32[256, 256], first 6.0, equal True",
        "[rank 0] 4 devices, each int64[3], first 6, equal True",
        "[rank 0] the mean on one device: [1.5 2.5 3.5]",
    ]
    assert said == ""


@pytest.mark.parametrize("program", ["hints", "options", "cross_device", "multi_worker"])
def test_the_import_is_all_that_was_changed(program: str) -> None:
    text = (ROOT / f"examples/seeds/{program}.py").read_text()
    imports: Any = re.findall(r"^(?:import|from) .*$", text, re.MULTILINE)
    assert [line for line in imports if "collectived" in line] == ["import collectived as tf"]
