"""One process that the launcher started: its words, its end, and the process group in which its own children are."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from collectived_launcher.launch.keeper import Keeper
from collectived_launcher.launch.loop import Loop
from collectived_launcher.launch.output import Pipe, Terminal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_LAST_WORDS = 12  # lines of standard error that are kept for the summary


class Child:
    """A process in a group of its own. When it ends, whoever is left in its group is killed.

    `status` is None while it runs, then as in `Popen.returncode`. `ended` is called once, after its last words.
    """

    def __init__(
        self, name: str, loop: Loop, keeper: Keeper, terminal: Terminal, log: Path | None, colour: int | None = None
    ) -> None:
        self.name = name
        self.pid = 0
        self.status: int | None = None
        self.last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self.ended: Callable[[], None] = lambda: None
        self._loop, self._keeper, self._terminal = loop, keeper, terminal
        self._log: IO[bytes] | None = log.open("ab") if log else None
        self._colour = colour

    @property
    def alive(self) -> bool:
        return self.pid != 0 and self.status is None

    def send(self, signum: int) -> None:
        """To the process and its children; a stopped process is woken so that it can act on it."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signum)
                os.killpg(self.pid, signal.SIGCONT)

    def hear(self, stream: int, line: bytes) -> None:
        if stream == 2:
            self.last_words.append(line.decode(errors="replace"))
        if self._log:
            self._log.write(line + b"\n")
            self._log.flush()
        self._terminal.show(stream, self.name, line, self._colour)

    def describe(self) -> str:
        return f"{self.name} (pid {self.pid})"

    def _before_program(self, die_with: int | None = None) -> Callable[[], None]:
        """What the new process does before it becomes the program (safe, as the launcher has one thread): the keeper
        learns of it, and if wished the death of its parent is its own, even if that has happened already."""

        def prepare() -> None:
            self._keeper.add_this_process()
            if die_with is not None:
                _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != die_with:
                    os.kill(os.getpid(), signal.SIGKILL)

        return prepare

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Takes over a process that was just started."""
        assert process.stdout is not None and process.stderr is not None
        self._process, self.pid = process, process.pid
        self._pipes = [Pipe(process.stdout, self._hear_out), Pipe(process.stderr, self._hear_err)]
        for pipe in self._pipes:
            self._loop.watch(pipe.descriptor, partial(self._read, pipe))
        self._life = os.pidfd_open(self.pid)
        self._loop.watch(self._life, self._end)

    def _hear_out(self, line: bytes) -> None:
        self.hear(1, line)

    def _hear_err(self, line: bytes) -> None:
        self.hear(2, line)

    def _read(self, pipe: Pipe) -> None:
        descriptor = pipe.descriptor
        pipe.read()
        if not pipe.open:
            self._loop.forget(descriptor)

    def _end(self) -> None:
        # Not reaped yet, so its number still means its group and nobody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pipe in self._pipes:
            if pipe.open:
                self._loop.forget(pipe.descriptor)
                pipe.drain()
        self._keeper.remove(self.pid)
        self.status = self._process.wait()
        self._loop.forget(self._life)
        os.close(self._life)
        if self._log:
            self._log.close()
        self.ended()


class Client(Child):
    """The user's program as one rank."""

    def __init__(self, rank: int, loop: Loop, keeper: Keeper, terminal: Terminal, log: Path | None) -> None:
        super().__init__(f"rank {rank}", loop, keeper, terminal, log, colour=rank)
        self.rank = rank

    def start(self, program: Sequence[str], variables: Mapping[str, str]) -> None:
        """Starts the program; it is killed by the kernel when the launcher is no more.

        Raises:
            OSError: the kernel cannot run it.
        """
        environment = {"PYTHONUNBUFFERED": "1", **os.environ, **variables}  # so that progress shows as it happens
        self._follow(
            subprocess.Popen(
                list(program),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
                preexec_fn=self._before_program(die_with=os.getpid()),
            )
        )


class Daemon(Child):
    """A coordinator or a worker. Standard input is its lifeline: it carries the secret, and its end means "end"."""

    def __init__(self, name: str, loop: Loop, keeper: Keeper, terminal: Terminal, log: Path | None) -> None:
        super().__init__(name, loop, keeper, terminal, log)
        self.ready: dict[str, Any] | None = None
        self.became_ready: Callable[[], None] = lambda: None

    @property
    def address(self) -> str:
        """Where it serves."""
        assert self.ready is not None
        return str(self.ready["address"])

    @property
    def metrics(self) -> str:
        """Where its metrics are, for people; "" where they are not served."""
        where = self.ready.get("metrics", "") if self.ready else ""
        return f"metrics of {self.name}: http://{where}/metrics" if where else ""

    def start(self, command: Sequence[str], secret: str) -> None:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=self._before_program(),
        )
        assert process.stdin is not None
        self._lifeline: IO[bytes] = process.stdin
        self._follow(process)
        with contextlib.suppress(BrokenPipeError):  # it is dead already; its end will be noticed
            self._lifeline.write(f"{secret}\n".encode())
            self._lifeline.flush()

    def end_in_order(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._lifeline.close()

    def _end(self) -> None:
        self.end_in_order()  # closes our end of what nobody reads any more
        super()._end()

    def hear(self, stream: int, line: bytes) -> None:
        if stream == 1 and self.ready is None and line.startswith(b"ready "):
            self.ready = json.loads(line.removeprefix(b"ready "))
            self.became_ready()
        else:
            super().hear(2, line)
