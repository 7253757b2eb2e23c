"""A job on this host whose ranks are threads of this process, or processes that it starts."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from collectived.arguments import check_integer
from collectived.group import Group
from collectived.session import Session, connect
from collectived.testing.daemon import Daemon
from collectived_proto.options import CommunicationOptions

Result = TypeVar("Result")
_START_TIMEOUT = 30.0  # seconds
_JOB = "test"


class LocalJob:
    """One coordinator and some workers, as if each worker were a host of its own; `local()` makes it.

    Attributes:
        workers: the address of each worker, for `collectived.connect` or `COLLECTIVED_WORKER`.
    """

    def __init__(self, workers: Sequence[str], coordinator: Daemon, daemons: Sequence[Daemon]) -> None:
        self.workers = tuple(workers)
        self._coordinator, self._daemons = coordinator, tuple(daemons)
        self._groups = (f"group-{number}" for number in itertools.count())

    def connect(self, worker: int = 0) -> Session:
        """A session with a worker: `collectived.connect` with its address.

        Args:
            worker: its number, from 0.
        """
        return connect(self.workers[worker])

    def run(self, body: Callable[[Group], Result], ranks: int | None = None, *, timeout: float = 60.0) -> list[Result]:
        """Runs `body(group)` as every rank of a new group, each in a thread and session of its own.

        Args:
            body: the function of each rank. Leaving it by an exception aborts the group, as leaving the group's `with`
                does.
            ranks: how many, spread over the workers in blocks; by default one per worker.
            timeout: seconds to wait for the others when joining, and the default of each collective.

        Returns:
            The results of all ranks, by rank.

        Raises:
            ValueError: `ranks` is no whole number from 1.

        Raises the exception of the first rank to fail, with a note about the other ranks that failed.
        """
        size = check_integer(len(self.workers) if ranks is None else ranks, "ranks", 1, 4096, "a whole number from 1")
        name, failed = next(self._groups), dict[int, BaseException]()
        options = CommunicationOptions(timeout_seconds=timeout)

        def watched(group: Group) -> Result:
            try:
                return body(group)
            except BaseException as error:  # noted before this rank leaves, which makes the others fail
                failed[group.rank] = error
                raise

        def one(rank: int) -> Result | None:
            try:
                with (
                    connect(self._worker_of(rank, size)) as session,
                    session.join(name, size, rank=rank, timeout=timeout, options=options) as group,
                ):
                    return watched(group)
            except BaseException as error:
                failed.setdefault(rank, error)
                return None

        with ThreadPoolExecutor(size, "rank") as pool:
            results = list(pool.map(one, range(size)))
        if failed:
            first = next(iter(failed.values()))
            first.add_note(_format_failures(failed, size))
            raise first
        return results  # type: ignore[return-value]

    def environment(self, rank: int, ranks: int, group: str = "world") -> dict[str, str]:
        """The variables that make another process that rank, as `collectived launch` would set them.

        Args:
            rank: of the process.
            ranks: of the group in all; the same for all processes that are to meet.
            group: its name, the same for all; give every test a group of its own.
        """
        worker = self._worker_of(rank, ranks)
        local = [other for other in range(ranks) if self._worker_of(other, ranks) == worker]
        return {
            "COLLECTIVED_WORKER": worker,
            "COLLECTIVED_JOB": _JOB,
            "COLLECTIVED_GROUP": group,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(local.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(local)),
            "GROUP_RANK": str(self.workers.index(worker)),
        }

    def run_program(
        self, command: Sequence[str], ranks: int | None = None, *, timeout: float = 60.0
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs a program as every rank of a new group, each in a process of its own.

        Args:
            command: the program and its arguments, such as `[sys.executable, "train.py"]`.
            ranks: how many, spread over the workers in blocks; by default one per worker.
            timeout: seconds until processes that have not ended are killed.

        Returns:
            How each ended, and its standard output and error as text, by rank.

        Raises:
            TimeoutError: one did not end in time; all have been killed.
        """
        size = check_integer(len(self.workers) if ranks is None else ranks, "ranks", 1, 4096, "a whole number from 1")
        group, end = next(self._groups), time.monotonic() + timeout
        with ExitStack() as stack:
            processes = [
                stack.enter_context(_run_process(command, self.environment(rank, size, group))) for rank in range(size)
            ]
            with ThreadPoolExecutor(size, "rank") as pool:  # all pipes are read side by side, so that none is full
                heard = [pool.submit(process.communicate, None, end - time.monotonic()) for process in processes]
                try:
                    said = [future.result() for future in heard]
                except subprocess.TimeoutExpired:
                    late = [rank for rank, process in enumerate(processes) if process.poll() is None]
                    for process in processes:
                        process.kill()
                    raise TimeoutError(f"ranks {late} of {list(command)} did not end within {timeout:g} s") from None
        return [
            subprocess.CompletedProcess(list(command), process.returncode, *words)
            for process, words in zip(processes, said, strict=True)
        ]

    def kill(self, worker: int) -> None:
        """Ends a worker at once (SIGKILL), like a host that fails, to test what your ranks do then.

        Args:
            worker: its number, from 0.
        """
        self._daemons[worker].kill()

    @property
    def log(self) -> str:
        """The lines that the daemons have written so far."""
        return "".join(daemon.log for daemon in (self._coordinator, *self._daemons))

    def _worker_of(self, rank: int, size: int) -> str:
        return self.workers[rank // -(-size // len(self.workers))]


@contextmanager
def local(workers: int = 1, *, timeout: float = _START_TIMEOUT) -> Iterator[LocalJob]:
    """Starts a coordinator and workers on this host, and ends them with the block.

    They are real daemons of this test alone: on Unix sockets in a folder of their own, with loopback links
    between workers, and gone when this process is, however it ends.

    Args:
        workers: how many; each is as if on a host of its own.
        timeout: seconds in which each daemon must serve.

    Raises:
        ValueError: `workers` is no whole number from 1 to 64.
        UnavailableError: a daemon did not serve in time; the text has its last words.
    """
    count = check_integer(workers, "workers", 1, 64, "a whole number from 1 to 64")
    secret = secrets.token_hex(32)
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))  # short: a socket's path has 107 bytes at most
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        coordinator = Daemon(["coordinator", "--job", _JOB, "--listen", f"unix:{folder}/c.sock"], secret)
        stack.push(_closing(coordinator))
        address = str(coordinator.wait_ready(timeout)["address"])
        options = ["--job", _JOB, "--coordinator", address, "--folder", str(folder), "--link-listen", "127.0.0.1:0"]
        daemons = []
        for task in range(count):
            daemons.append(Daemon(["worker", "--task", str(task), "--host-name", f"host{task}", *options], secret))
            stack.push(_closing(daemons[-1]))
        yield LocalJob([str(daemon.wait_ready(timeout)["address"]) for daemon in daemons], coordinator, daemons)


def _closing(daemon: Daemon) -> Callable[..., None]:
    """Return a function that ends a daemon. It raises that the daemon was killed only if no other error is raised."""

    def close(_: object, error: BaseException | None, __: object) -> None:
        try:
            daemon.close()
        except subprocess.TimeoutExpired as late:
            if error is None:
                raise
            error.add_note(f"a daemon had to be killed: {late}")

    return close


@contextmanager
def _run_process(command: Sequence[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        list(command),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # nothing where it has ended


def _format_failures(failed: Mapping[int, BaseException], size: int) -> str:
    lines = "".join(f"\n  rank {rank}: {type(error).__name__}: {error}" for rank, error in failed.items())
    return f"{len(failed)} of {size} ranks failed, the first one first:{lines}"
