"""This host: programs become processes by fork and exec, in groups of their own, which a keeper knows of."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from collectived_launcher.launch import errands
from collectived_launcher.launch.host import NOT_RUN, Answer, Facts, Listener, Program
from collectived_launcher.launch.keeper import Keeper, remove_traces
from collectived_launcher.launch.loop import Loop
from collectived_launcher.launch.output import Pipe
from collectived_proto.local import jobs
from collectived_proto.types import RELEASE

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Here:
    """This host.

    Args:
        folder: for the job's sockets. It is made when opened, and removed with the job's file when closed.
        variables: what every program gets on top of our own environment, below its own.
    """

    def __init__(
        self, loop: Loop, folder: Path, name: str = "localhost", variables: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.how = self.target = ""
        self.facts: Facts | None = None
        self.trouble = ""
        self._loop, self._folder, self._variables = loop, folder, dict(variables or {})
        self._keeper: Keeper | None = None
        self._processes: set[LocalProcess] = set()
        self._errands = errands.Errands(loop, folder)
        self._quiet = False

    @property
    def gone(self) -> bool:
        return self._keeper is None

    @property
    def keeper(self) -> Keeper:
        assert self._keeper is not None, "open() comes first"
        return self._keeper

    def open(self, changed: Callable[[], None]) -> None:
        """
        Raises:
            OSError: the folder cannot be made.
        """
        self._keeper = Keeper(self._folder)
        while not self._folder.exists():
            with contextlib.suppress(FileNotFoundError):  # another job ended and removed the user's empty folder
                jobs.runtime_folder()
                self._folder.mkdir(mode=0o700)
        self.facts = facts(self._folder)
        self._loop.later(0.0, changed)

    def start(self, program: Program, listener: Listener) -> LocalProcess:
        # Progress is to show as it happens.
        environment = {"PYTHONUNBUFFERED": "1", **os.environ, **self._variables, **program.variables}
        process = LocalProcess(self._loop, self.keeper, listener, self._processes.discard)
        try:
            process.begin(program, environment, quiet=self._quiet)
        except (OSError, ValueError) as error:  # no such program or folder; a zero byte in an argument
            self._loop.later(0.0, partial(process.refuse, _why_not(program, error)))
        else:
            self._processes.add(process)
        return process

    def ask(self, errand: str, about: Mapping[str, object], answered: Callable[[Answer], None]) -> None:
        self._errands.run(errand, about, answered)

    def hush(self, quiet: bool) -> None:
        """Reads nothing of what processes write for as long as it is `quiet`: nobody takes what was read."""
        if quiet is not self._quiet:
            self._quiet = quiet
            for process in self._processes:
                process.hush(quiet)

    def keep_warm(self) -> None:
        """Nobody waits for a sign of life of ours here."""

    def kill(self) -> None:
        """Nothing is in our way here: `close` is enough."""

    def close(self) -> None:
        """Kills who is left, which are few: whoever runs a job has ended its processes before."""
        self._errands.close()
        for process in list(self._processes):
            process.send(signal.SIGKILL)
        while self._processes:
            self._loop.turn()
        remove_traces(self._folder)
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        self.facts = None


def facts(folder: Path) -> Facts:
    """What this host says of itself."""
    interfaces = errands.interfaces()
    # "client address, client port, server address, server port", from OpenSSH's server; perhaps from that of the host
    # where the user logged in.
    reached_at = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2]
    return Facts(
        hostname=os.uname().nodename,
        python=sys.executable,
        release=RELEASE,
        cpus=len(os.sched_getaffinity(0)),
        folder=str(folder),
        interfaces=interfaces,
        reached_at=reached_at if reached_at in {one.address for one in interfaces} else "",
    )


def _why_not(program: Program, error: Exception) -> str:
    if isinstance(error, OSError) and program.folder and error.filename == program.folder:
        return f"folder {program.folder!r} cannot be entered: {error.strerror}"
    return f"{program.argv[0]!r} cannot be run: {error}"


class LocalProcess:
    """A process in a group of its own. When it ends, whoever is left in its group is killed."""

    def __init__(self, loop: Loop, keeper: Keeper, listener: Listener, over: Callable[[LocalProcess], None]) -> None:
        self.pid = 0
        self.status: int | None = None
        self.trouble = ""
        self._loop, self._keeper, self._listener, self._over = loop, keeper, listener, over
        self._lifeline: int | None = None

    def begin(self, program: Program, environment: Mapping[str, str], quiet: bool) -> None:
        """
        Raises:
            OSError, ValueError: the kernel cannot run it.
        """
        attached = program.secret is not None
        self._process = subprocess.Popen(
            list(program.argv),
            env=dict(environment),
            cwd=program.folder or None,
            stdin=subprocess.PIPE if attached else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=partial(_before_program, self._keeper, None if attached else os.getpid()),
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None and self._process.stderr is not None
        self._pipes = [
            Pipe(self._process.stdout, partial(self._listener.heard, 1)),
            Pipe(self._process.stderr, partial(self._listener.heard, 2)),
        ]
        if not quiet:
            self.hush(False)
        self._life = os.pidfd_open(self.pid)
        self._loop.watch(self._life, self._end)
        if self._process.stdin is not None:
            self._lifeline = os.dup(self._process.stdin.fileno())
            self._process.stdin.close()
            with contextlib.suppress(BrokenPipeError):  # it is dead already; its end will be noticed
                os.write(self._lifeline, f"{program.secret}\n".encode())

    def refuse(self, why: str) -> None:
        """It could not be run."""
        self.status, self.trouble = NOT_RUN, why
        self._listener.ended()

    def send(self, signum: int) -> None:
        if self.pid and self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signum)
                os.killpg(self.pid, signal.SIGCONT)

    def end_in_order(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def hush(self, quiet: bool) -> None:
        for pipe in self._pipes:
            if pipe.open and quiet:
                self._loop.forget(pipe.descriptor)
            elif pipe.open:
                self._loop.watch(pipe.descriptor, partial(self._read, pipe))
        self._hushed = quiet

    _hushed = True

    def _read(self, pipe: Pipe) -> None:
        descriptor = pipe.descriptor
        pipe.read()
        if not pipe.open:
            self._loop.forget(descriptor)

    def _end(self) -> None:
        self.end_in_order()  # closes our end of what nobody reads any more
        # Not reaped yet, so its number still means its group and nobody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pipe in self._pipes:
            if pipe.open:
                if not self._hushed:
                    self._loop.forget(pipe.descriptor)
                pipe.drain()
        self._keeper.remove(self.pid)
        self.status = self._process.wait()
        self._loop.forget(self._life)
        os.close(self._life)
        self._over(self)
        self._listener.ended()


def _before_program(keeper: Keeper, die_with: int | None) -> None:
    """What the new process does before it becomes the program (safe, as the launcher has one thread): the keeper learns
    of it, and if wished the death of its parent is its own, even if that has happened already."""
    keeper.add_this_process()
    if die_with is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != die_with:
            os.kill(os.getpid(), signal.SIGKILL)
