"""PyTorch's own tests of torch.distributed, as they lie in its wheel, run over this backend.

    python -m tests.e2e.torch.upstream --world-size 3 [--like gloo] [--names test_broadcast,test_reduce_sum]

Beside starting daemons it does what PyTorch's `test_distributed_spawn.py` does: it makes the test class, and enters
this backend in the tables of torch.testing that say what a backend can. Ranks are forked instead of spawned, which is
much quicker, and are dealt to two workers in turn, as if these were two hosts. Prints one line per test: how it ended,
its name, and why.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.e2e.upstream_outcomes import Outcome, PrintedResult, read_outcomes

import collectived as cd

ROOT = Path(__file__).parents[3]
WORKERS = 2
_WORKERS_VARIABLE = "COLLECTIVED_TEST_WORKERS"


def run_suite(
    world_size: int, names: Sequence[str] = ("*",), like: str = "", *, limit: int = 60, timeout: float | None = None
) -> list[Outcome]:
    """The outcomes of PyTorch's tests with this many ranks.

    Args:
        names: patterns of tests to run. like: also run what decorators give to this backend alone, `gloo` or `mpi`.
        limit: seconds for one test. timeout: seconds for all.
    """
    command = [sys.executable, "-m", "tests.e2e.torch.upstream", "--inner", "--names", ",".join(names)]
    with tempfile.TemporaryDirectory() as folder, cd.testing.local(WORKERS) as job:
        environment = {
            **os.environ,
            "BACKEND": "collectived",
            "WORLD_SIZE": str(world_size),
            "TEMP_DIR": folder,
            "MASTER_ADDR": "localhost",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(limit),
            "OMP_NUM_THREADS": "1",
            "COLLECTIVED_JOB": job.environment(0, 1)["COLLECTIVED_JOB"],
            _WORKERS_VARIABLE: ",".join(job.workers),
        }
        if like:
            command += ["--like", like]
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=timeout, check=True
        )
    return read_outcomes(ended.stdout)


def make_test_class(like: str) -> Any:
    """PyTorch's tests as a class of test cases."""
    import torch
    from torch.testing._internal.common_distributed import DistTestCases

    import collectived_torch

    collectived_torch.register()  # PyTorch 2.4 reads no entry points
    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add("collectived")
    os.environ["BACKEND"] = like or "collectived"  # what decorators look at when the class is made
    from torch.testing._internal.distributed import distributed_test
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    os.environ["BACKEND"] = distributed_test.BACKEND = "collectived"

    class TestForked(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]  # torch is not there
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, *arguments: Any, **more: Any) -> None:
            workers = os.environ[_WORKERS_VARIABLE].split(",")
            os.environ["COLLECTIVED_WORKER"] = workers[rank % len(workers)]
            super()._run(rank, *arguments, **more)

    return TestForked


def _run_inner(patterns: Sequence[str], like: str) -> None:
    tests = make_test_class(like)
    result = PrintedResult()
    for name in unittest.TestLoader().getTestCaseNames(tests):
        if any(fnmatch(name, pattern) for pattern in patterns):
            tests(name).run(result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--like", default="")
    parser.add_argument("--names", default="*")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        _run_inner(options.names.split(","), options.like)
        return 0
    outcomes = run_suite(options.world_size, options.names.split(","), options.like)
    for outcome in outcomes:
        print(*outcome, sep="\t")
    counts = {how: sum(outcome.how == how for outcome in outcomes) for how in ("pass", "fail", "skip")}
    print(f"{options.world_size} ranks, {options.like or 'collectived'}: {counts}", file=sys.stderr)
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
