"""Programs in processes of their own that need not import what a process before them has imported.

A start costs some milliseconds of processor time instead of hundreds, and tests start thousands of processes. What a
program does and sees is the same as after `python -u -c`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Self

from tests.fork_server import STATUS, Request
from tests.waiting import is_readable

_ROOT = Path(__file__).parents[1]
_ENVIRONMENT = dict(os.environ)  # before any test has changed it: one may look for processes that have what it set
_SERVE = "import sys; from tests.fork_server import main; main(int(sys.argv[1]), sys.argv[2:])"


class ForkServer:
    """Starts programs where those modules are imported already."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _SERVE, str(theirs.fileno()), *modules],
                cwd=_ROOT,
                env={**_ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1"},  # its threads would not be there after a fork
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(
        self, program: str, environment: Mapping[str, str], text: bool = True, folder: str | Path | None = None
    ) -> ForkedProcess:
        """Run a program with pipes for its standard streams, of text or of bytes; without a `folder` in this one."""
        request = Request(program, str(folder or os.getcwd()), dict(environment))
        (stdin, our_stdin), (our_stdout, stdout), (our_stderr, stderr), (ended, told) = (os.pipe() for _ in range(4))
        theirs = [stdin, stdout, stderr, told]
        try:
            with self._asking:
                socket.send_fds(self._control, [json.dumps(asdict(request)).encode()], theirs)
                pid = int(self._control.recv(20))
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return ForkedProcess(pid, our_stdin, our_stdout, our_stderr, ended, text)

    def close(self) -> None:
        """End the server; the programs go on."""
        self._control.close()
        self._process.wait()


@functools.cache
def fork_server(*modules: str) -> ForkServer:
    """The server with those modules of this process: its tests share it from the first one that asks."""
    server = ForkServer(modules)
    atexit.register(server.close)
    return server


class ForkedProcess:
    """A program, held as `subprocess.Popen` with three pipes holds one.

    Attributes:
        returncode: None until it was seen to have ended.
    """

    def __init__(self, pid: int, stdin: int, stdout: int, stderr: int, ended: int, text: bool) -> None:
        kind = "" if text else "b"
        self.pid = pid
        self.returncode: int | Any = None  # as Popen has it
        self.stdin: IO[Any] = os.fdopen(stdin, f"w{kind}")
        self.stdout: IO[Any] = os.fdopen(stdout, f"r{kind}")
        self.stderr: IO[Any] = os.fdopen(stderr, f"r{kind}")
        self._ended = os.fdopen(ended, "rb", buffering=0)
        self._said: dict[IO[Any], str] = {}
        self._readers: list[threading.Thread] = []

    def poll(self) -> int | None:
        """How it ended: its exit status, or minus the signal; None where it goes on."""
        return self._await_end(0)

    def wait(self, timeout: float | None = None) -> int:
        """The same, when it has ended.

        Raises:
            subprocess.TimeoutExpired: it goes on for longer than that.
        """
        code = self._await_end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def communicate(self, text: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Say this, close its input, and wait for its end: what it has written to standard output and error."""
        if not self._readers:
            self._readers = [
                threading.Thread(target=self._read, args=[stream], daemon=True) for stream in (self.stdout, self.stderr)
            ]
            for reader in self._readers:
                reader.start()
        with contextlib.suppress(BrokenPipeError):
            if text:
                self.stdin.write(text)
            self.stdin.close()
        end = None if timeout is None else time.monotonic() + timeout
        for reader in self._readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        for reader in self._readers:  # it has ended, but not who has inherited its pipes
            if reader.is_alive():
                raise subprocess.TimeoutExpired(f"the pipes of process {self.pid}", timeout or 0.0)
        return self._said[self.stdout], self._said[self.stderr]

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended in between
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.wait()

    def _read(self, stream: IO[Any]) -> None:
        with stream:
            self._said[stream] = stream.read()

    def _await_end(self, timeout: float | None) -> int | None:
        if self.returncode is None and is_readable(self._ended, timeout):
            told = self._ended.read()
            assert told, "the fork server has ended before this process"
            (self.returncode,) = STATUS.unpack(told)
            self._ended.close()
        return self.returncode
