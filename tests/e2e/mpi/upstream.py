"""mpi4py's own tests, as they lie in its sdist, run over `collectived.mpi` in place of mpi4py.

    python -m tests.e2e.mpi.upstream FOLDER [--ranks 3] [--names testBcast,TestP2PBuf*.*]

FOLDER is `test` of the unpacked sdist. Every rank is a process, and runs the same tests in the same order, each over a
group of its own, so that a test which fails spoils no other. Prints one line per test: how it ended on all ranks, its
name, and why.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import types
import unittest
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tests.e2e.upstream_outcomes import Outcome, PrintedResult, read_outcomes

import collectived as cd
from collectived import mpi

ROOT = Path(__file__).parents[3]
WORKERS = 2
PATTERNS = {  # by module, which of its tests are about calls that exist here; the others look into MPI's own objects
    **dict.fromkeys(("test_cco_buf", "test_cco_vec", "test_cco_nb_buf", "test_cco_nb_vec", "test_p2p_buf"), ("*",)),
    "test_comm": ("testSize", "testRank", "testSplit", "testSplitTypeShared"),
}
_TIMEOUT = 20.0  # seconds for one call


class _Nothing:
    """In place of constants that are compared with, and of types that are not offered."""


def run_suite(folder: Path, ranks: int, names: Sequence[str] = ("*",), *, timeout: float = 600.0) -> list[Outcome]:
    """The outcomes of mpi4py's tests with this many ranks.

    Args:
        folder: of the tests. names: patterns of `class.test`. timeout: seconds for all.
    """
    command = [sys.executable, "-m", "tests.e2e.mpi.upstream", str(folder), "--inner", "--names", ",".join(names)]
    with cd.testing.local(WORKERS) as job:
        ended = job.run_program(command, ranks, timeout=timeout)
    for process in ended:
        assert process.returncode == 0, process.stderr
    by_rank = [read_outcomes(process.stdout) for process in ended]
    return [_join(one) for one in zip(*by_rank, strict=True)]


def _join(by_rank: Sequence[Outcome]) -> Outcome:
    """How a test ended on all ranks: the first that failed says why."""
    assert len({outcome.name for outcome in by_rank}) == 1
    for how in ("fail", "skip"):
        for rank, outcome in enumerate(by_rank):
            if outcome.how == how:
                return outcome._replace(why=f"rank {rank}: {outcome.why}")
    return by_rank[0]


def make_mpi4py() -> types.ModuleType:
    """A module that is to `import mpi4py` what `collectived.mpi` is to `from mpi4py import MPI`."""
    module = types.ModuleType("mpi4py.MPI")
    vars(module).update({name: getattr(mpi, name) for name in mpi.__all__})

    class SendsAlike(mpi.Comm):
        """A `Send` is buffered and may come before its `Recv`, so it is what these promise, but for Ssend's waiting."""

        Bsend = Ssend = Rsend = mpi.Comm.Send
        Ibsend = Issend = Irsend = mpi.Comm.Isend

    vars(module).update(
        Comm=SendsAlike,
        BOTTOM=_Nothing(),
        **dict.fromkeys(("DATATYPE_NULL", "LONG_DOUBLE", "C_LONG_DOUBLE_COMPLEX"), _Nothing()),
        BSEND_OVERHEAD=0,
        THREAD_SINGLE=0,
        Query_thread=lambda: 0,
        Get_version=lambda: (4, 0),
        get_vendor=lambda: ("collectived", (0, 1, 0)),
        Attach_buffer=lambda buffer: None,
        Detach_buffer=lambda: None,
        Alloc_mem=bytearray,
        Free_mem=lambda buffer: None,
    )
    package = types.ModuleType("mpi4py")
    package.MPI = module  # type: ignore[attr-defined]
    sys.modules.update({"mpi4py": package, "mpi4py.MPI": module})
    return module


def load_tests(folder: Path, patterns: Sequence[str]) -> Iterator[unittest.TestCase]:
    """Tests of communicators of all ranks and of one.

    Left out are arrays that only look as if on a GPU, and those of DLPack: their memory goes with the capsule, though
    whoever has taken it out may use it until it calls the deleter.
    """
    sys.path.insert(0, str(folder))
    arrays = importlib.import_module("arrayimpl")
    arrays.ArrayBackends[:] = [one for one in arrays.ArrayBackends if one.__name__ in ("ArrayArray", "ArrayNumPy")]
    for module, own in PATTERNS.items():
        for name, tests in sorted(vars(importlib.import_module(module)).items()):
            if name.startswith("Test") and name.endswith(("Self", "World")):
                for test in unittest.TestLoader().getTestCaseNames(tests):
                    wanted = any(fnmatch(f"{module}.{name}.{test}", f"*{pattern}") for pattern in patterns)
                    if wanted and any(fnmatch(test, pattern) for pattern in own):
                        yield tests(test)


class _Result(PrintedResult):
    def __init__(self, communicator: type[mpi.Comm]) -> None:
        super().__init__()
        self._communicator = communicator
        self._session = cd.connect()
        self._group: cd.Group | None = None
        self._has_failed = False

    def name(self, test: Any) -> str:
        return f"{type(test).__module__}.{type(test).__name__}.{test._testMethodName}"

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        options = cd.CommunicationOptions(timeout_seconds=_TIMEOUT)
        name = self.name(test)
        if type(test).__name__.endswith("Self"):
            name, size = f"{name}-{rank}", 1
        self._group = self._session.join(name, size, rank=rank if size > 1 else 0, options=options, timeout=60)
        test.COMM = self._communicator(self._group)
        test.setUp = lambda: None  # which would set it
        self._has_failed = False

    def stopTest(self, test: Any) -> None:
        if self._group is not None:
            if self._has_failed:
                self._group.abort(f"{self.name(test)} failed")
            with contextlib.suppress(cd.errors.CollectiveError):
                self._group.leave()
        super().stopTest(test)

    def tell(self, how: str, test: Any, why: str = "") -> None:
        if not self._has_failed:
            super().tell(how, test, why)
        self._has_failed |= how == "fail"

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addFailure(test, err)


def _run_inner(folder: Path, patterns: Sequence[str]) -> None:
    result = _Result(make_mpi4py().Comm)
    for test in load_tests(folder, patterns):
        test.run(result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--names", default="*")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        _run_inner(options.folder, options.names.split(","))
        return 0
    outcomes = run_suite(options.folder, options.ranks, options.names.split(","))
    for outcome in outcomes:
        print(*outcome, sep="\t")
    counts = {how: sum(outcome.how == how for outcome in outcomes) for how in ("pass", "fail", "skip")}
    print(f"{options.ranks} ranks: {counts}", file=sys.stderr)
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
