"""Everything about GPUs on a machine that has one, unattended: `python -m benchmarks.gpu_report FOLDER [STEP …]`.

Each step is a process of its own under a limit of ten minutes (`--limit`), and leaves FOLDER/STEP.txt with what it
said. A step that fails or is broken off does not keep the next from being run. FOLDER/summary.txt has a line for each.

The machine needs no network where `make gpu-wheels` was run on one that has it: `make gpu-report` installs what lies in
.gpu-wheels beside what the machine's Python has already (PyTorch, CuPy, JAX, cuda-bindings, libnccl).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 600.0  # seconds of a step
TIMED_OUT = 124  # as `timeout` ends
# A call that hangs in the driver holds up the signal by which a test is usually ended: a thread ends the process.
_PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-rfEsP", "--timeout-method=thread")
_ARRAYS = "tests/e2e/gpu/test_device_arrays.py"


@dataclass(frozen=True)
class Step:
    """Arguments of Python, and of what it is the report."""

    title: str
    arguments: Sequence[str]


STEPS: Mapping[str, Step] = {
    "environment": Step("driver, libraries and their versions", ("-m", "benchmarks.gpu_environment")),
    "tests": Step(
        "driver, kernels, shared memory, events, collectives",
        (
            *(*_PYTEST, "-n", "6", "tests/fakes", "tests/runtime/device", "tests/e2e/gpu"),
            *("-k", "not device_arrays and not device_faults and not on_device"),
        ),
    ),
    # Each library in a process of its own, which has nothing of the others' memory.
    "cupy": Step("arrays of CuPy in all collectives", (*_PYTEST, "-n", "0", _ARRAYS, "-k", "cupy-real")),
    "torch": Step("arrays of PyTorch in all collectives", (*_PYTEST, "-n", "0", _ARRAYS, "-k", "torch-real")),
    "jax": Step("arrays of JAX in all collectives", (*_PYTEST, "-n", "0", _ARRAYS, "-k", "jax-real")),
    "bindings": Step(
        "the three bindings of NCCL",
        (*_PYTEST, "-n", "0", "tests/runtime/device/nccl/test_binding_on_device.py", "-k", "not stand-in"),
    ),
    "faults": Step(
        "killed processes, deadlines, flat memory",
        (*_PYTEST, "-n", "0", "tests/e2e/gpu/test_device_faults.py", "-k", "real"),
    ),
    "figures": Step("time of collectives beside NCCL's", ("-m", "benchmarks.gpus")),
    "training": Step("data-parallel training beside NCCL's", ("-m", "benchmarks.gpu_training")),
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the reports are written")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; none: all")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a step (default: %(default)g)")
    told = parser.parse_args(arguments)
    folder, names = told.folder, told.steps or list(STEPS)
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"unknown step {unknown[0]!r}: expected one of {', '.join(STEPS)}")
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that run() ends what it has started
    lines = []
    for name in names:
        began = time.monotonic()
        status = run(STEPS[name].arguments, folder / f"{name}.txt", told.limit)
        lines.append(summarize(name, status, time.monotonic() - began))
        print(lines[-1], flush=True)
        (folder / "summary.txt").write_text("\n".join(lines) + "\n")
    return int(any(": failed" in line or ": broken off" in line for line in lines))


def summarize(name: str, status: int, seconds: float) -> str:
    """The line of a step in the summary."""
    came = {0: "passed", TIMED_OUT: "broken off at its limit"}.get(status, f"failed with status {status}")
    return f"{name} ({STEPS[name].title}): {came} after {seconds:.0f} s"


def run(arguments: Sequence[str], report: Path, limit: float) -> int:
    """Run Python in a session of its own, and end all that it started with it. Return its exit status."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with report.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
