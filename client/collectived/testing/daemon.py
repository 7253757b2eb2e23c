"""One daemon as a child of this process; the end of its standard input ends it, even when this process is killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from collectived.errors import UnavailableError
from collectived_proto.config.flags import NO_TLS_FLAGS

# -P: a file random.py in the user's folder must not be taken for Python's own.
COMMAND = (sys.executable, "-P", "-m", "collectived_runtime")
_READY = "ready "
_EXIT_TIMEOUT = 10.0  # seconds


class Daemon:
    """Args:
    arguments: `coordinator …` or `worker …`.
    secret: the job's, passed over standard input.
    within: a command that runs another, such as `("ip", "netns", "exec", "a")`.

    Attributes:
        COMMAND: what runs a daemon.
    """

    COMMAND: Sequence[str] = COMMAND

    def __init__(self, arguments: Sequence[str], secret: str, within: Sequence[str] = ()) -> None:
        told = [arguments[0], *NO_TLS_FLAGS, *arguments[1:], "--attached"]
        self.process = self._start(within, told)
        self._name = arguments[0]
        self._log_lines: list[str] = []
        self._reader = threading.Thread(target=self._read, name="collectived-testing", daemon=True)
        self._reader.start()
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended already: wait_ready() says why
            self.process.stdin.write(f"{secret}\n".encode())
            self.process.stdin.flush()

    @property
    def log(self) -> str:
        """The lines that it has written so far."""
        return "".join(self._log_lines)

    def wait_ready(self, timeout: float) -> dict[str, Any]:
        """Wait until it serves, and return its announcement: its `address`, and more.

        Raises:
            UnavailableError: it has ended, or does not serve in time.
        """
        line = self._first_line(timeout)
        if not line.startswith(_READY):
            self.kill()
            self.close()
            raise UnavailableError(f"the {self._name} did not serve within {timeout:g} s; it said: {self.log.strip()}")
        found: dict[str, Any] = json.loads(line.removeprefix(_READY))
        return found

    def kill(self) -> None:
        """Ends it at once (SIGKILL), as a host that fails does."""
        self.process.kill()

    def close(self) -> None:
        """Ends it in order; one that does not end within ten seconds is killed.

        Raises:
            subprocess.TimeoutExpired: it had to be killed.
        """
        assert self.process.stdin and self.process.stdout and self.process.stderr
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._reader.join()
            self.process.stdout.close()
            self.process.stderr.close()

    def _start(self, within: Sequence[str], arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen([*within, *self.COMMAND, *arguments], stdin=pipe, stdout=pipe, stderr=pipe)

    def _first_line(self, timeout: float) -> str:
        assert self.process.stdout
        pipe, seen, end = self.process.stdout.fileno(), b"", time.monotonic() + timeout
        poll = select.poll()  # select() takes no descriptor from 1024 on
        poll.register(pipe, select.POLLIN)
        while b"\n" not in seen:
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                return ""
            piece = os.read(pipe, 65536)
            if not piece:
                return ""
            seen += piece
        return seen.decode()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self._log_lines.append(line.decode(errors="replace"))
