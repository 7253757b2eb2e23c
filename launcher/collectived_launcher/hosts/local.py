"""This host: programs become processes by fork and exec, in groups of their own, which a reaper knows of."""

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

from collectived_launcher.hosts import host_tasks
from collectived_launcher.hosts.host import NOT_RUN, HostFacts, ProcessObserver, ProgramSpec, TaskResult
from collectived_launcher.hosts.loop import Loop
from collectived_launcher.hosts.output import PipeReader
from collectived_launcher.hosts.reaper import Reaper, remove_job_files
from collectived_proto.ipc import job_files
from collectived_proto.types import RELEASE

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class LocalHost:
    """This host.

    Args:
        folder: for the job's sockets. It is made when opened, and removed with the job's file when closed.
        variables: what every program gets on top of our own environment, below its own.
    """

    def __init__(
        self, loop: Loop, folder: Path, name: str = "localhost", variables: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.transport = self.target = ""
        self.facts: HostFacts | None = None
        self.trouble = ""
        self._loop, self._folder, self._variables = loop, folder, dict(variables or {})
        self._reaper: Reaper | None = None
        self._processes: set[LocalProcess] = set()
        self._tasks = host_tasks.HostTasks(loop, folder, self._variables.get("PATH", ""))
        self._output_paused = False

    @property
    def closed(self) -> bool:
        return self._reaper is None

    @property
    def reaper(self) -> Reaper:
        assert self._reaper is not None, "open() comes first"
        return self._reaper

    def open(self, changed: Callable[[], None]) -> None:
        """
        Raises:
            OSError: the folder cannot be made.
        """
        self._reaper = Reaper(self._folder)
        while not self._folder.exists():
            with contextlib.suppress(FileNotFoundError):  # another job ended and removed the user's empty folder
                job_files.ensure_runtime_folder()
                self._folder.mkdir(mode=0o700)
        self.facts = collect_facts(self._folder)
        self._loop.call_later(0.0, changed)

    def start(self, program: ProgramSpec, listener: ProcessObserver) -> LocalProcess:
        # Progress is to show as it happens.
        environment = {"PYTHONUNBUFFERED": "1", **os.environ, **self._variables, **program.variables}
        process = LocalProcess(self._loop, self.reaper, listener, self._processes.discard)
        try:
            process.start(program, environment, quiet=self._output_paused)
        except (OSError, ValueError) as error:  # no such program or folder; a zero byte in an argument
            self._loop.call_later(0.0, partial(process.mark_not_run, _explain_not_run(program, error)))
        else:
            self._processes.add(process)
        return process

    def run_task(self, task: str, about: Mapping[str, object], answered: Callable[[TaskResult], None]) -> None:
        self._tasks.run(task, about, answered)

    def set_output_paused(self, quiet: bool) -> None:
        """Stop reading the output of processes while `quiet`, because the terminal takes no more."""
        if quiet is not self._output_paused:
            self._output_paused = quiet
            for process in self._processes:
                process.set_output_paused(quiet)

    def send_keepalive(self) -> None:
        """Nothing to do: no process here waits for a sign of life."""

    def kill(self) -> None:
        """Nothing is in our way here: `close` is enough."""

    def close(self) -> None:
        """Kill the processes that are left. They are few: the launcher has ended those of the job before."""
        self._tasks.close()
        for process in list(self._processes):
            process.send(signal.SIGKILL)
        while self._processes:
            self._loop.run_once()
        remove_job_files(self._folder)
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = None
        self.facts = None


def collect_facts(folder: Path) -> HostFacts:
    """Describe this host."""
    interfaces = host_tasks.list_interfaces()
    # "client address, client port, server address, server port", from OpenSSH's server; perhaps from that of the host
    # where the user logged in.
    reached_at = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2]
    return HostFacts(
        hostname=os.uname().nodename,
        python=sys.executable,
        release=RELEASE,
        cpus=len(os.sched_getaffinity(0)),
        folder=str(folder),
        interfaces=interfaces,
        reached_at=reached_at if reached_at in {one.address for one in interfaces} else "",
    )


def _explain_not_run(program: ProgramSpec, error: Exception) -> str:
    if isinstance(error, OSError) and program.folder and error.filename == program.folder:
        return f"folder {program.folder!r} cannot be entered: {error.strerror}; {host_tasks.FOLDER_HINT}"
    if isinstance(error, FileNotFoundError) and "/" not in program.argv[0]:
        return f"{program.argv[0]!r} is not in the PATH there; {host_tasks.PROGRAM_HINT}"
    return f"{program.argv[0]!r} cannot be run: {error}"


class LocalProcess:
    """A process in a group of its own. When it ends, the rest of its group is killed."""

    def __init__(
        self, loop: Loop, reaper: Reaper, listener: ProcessObserver, over: Callable[[LocalProcess], None]
    ) -> None:
        self.pid = 0
        self.status: int | None = None
        self.trouble = ""
        self._loop, self._reaper, self._observer, self._on_reaped = loop, reaper, listener, over
        self._stdin_fd: int | None = None

    def start(self, program: ProgramSpec, environment: Mapping[str, str], quiet: bool) -> None:
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
            preexec_fn=partial(_prepare_child, self._reaper, None if attached else os.getpid()),
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None and self._process.stderr is not None
        self._pipes = [
            PipeReader(self._process.stdout, partial(self._observer.on_output, 1)),
            PipeReader(self._process.stderr, partial(self._observer.on_output, 2)),
        ]
        if not quiet:
            self.set_output_paused(False)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.register(self._pidfd, self._on_exit)
        if self._process.stdin is not None:
            self._stdin_fd = os.dup(self._process.stdin.fileno())
            self._process.stdin.close()
            with contextlib.suppress(BrokenPipeError):  # it is dead already; its end will be noticed
                os.write(self._stdin_fd, f"{program.secret}\n".encode())

    def mark_not_run(self, why: str) -> None:
        """It could not be run."""
        self.status, self.trouble = NOT_RUN, why
        self._observer.on_exit()

    def send(self, signum: int) -> None:
        if self.pid and self.status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signum)
                os.killpg(self.pid, signal.SIGCONT)

    def close_stdin(self) -> None:
        if self._stdin_fd is not None:
            os.close(self._stdin_fd)
            self._stdin_fd = None

    def set_output_paused(self, quiet: bool) -> None:
        for pipe in self._pipes:
            if pipe.is_open and quiet:
                self._loop.unregister(pipe.descriptor)
            elif pipe.is_open:
                self._loop.register(pipe.descriptor, partial(self._read, pipe))
        self._output_paused = quiet

    _output_paused = True

    def _read(self, pipe: PipeReader) -> None:
        descriptor = pipe.descriptor
        pipe.read()
        if not pipe.is_open:
            self._loop.unregister(descriptor)

    def _on_exit(self) -> None:
        self.close_stdin()  # closes this end of a pipe that has no reader any more
        # Not reaped yet, so its number still means its group and no other one.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pipe in self._pipes:
            if pipe.is_open:
                if not self._output_paused:
                    self._loop.unregister(pipe.descriptor)
                pipe.read_remaining()
        self._reaper.unregister_group(self.pid)
        self.status = self._process.wait()
        self._loop.unregister(self._pidfd)
        os.close(self._pidfd)
        self._on_reaped(self)
        self._observer.on_exit()


def _prepare_child(reaper: Reaper, die_with: int | None) -> None:
    """Prepare the new process before it becomes the program: register it with the reaper.

    This is safe, as the launcher has one thread. With `die_with` the process is killed when its parent dies, also if
    the parent has died already.
    """
    reaper.register_current_process()
    if die_with is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != die_with:
            os.kill(os.getpid(), signal.SIGKILL)
