"""The reaper: a small process that cleans up after a launcher that was killed.

Its standard input is a pipe that only the launcher holds. `+N` says that process group N belongs to the job, `-N` that
it is over. The end of the pipe is the end of the launcher: what is left of the groups is ended (SIGTERM, a short wait,
SIGKILL), then the job's folder and file are removed. After an orderly end nothing is left to do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from collectived_proto.private_files import draft_path

KILL_AFTER = 2.0  # seconds between SIGTERM and SIGKILL


class Reaper:
    """The launcher's end of the pipe."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "collectived_launcher.hosts.reaper", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the launcher's affair
        )

    def register_current_process(self) -> None:
        """Called by a new child that leads its group, before it becomes another program: from then on it has children,
        and the launcher may be killed at any moment."""
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a reaper that was killed is no reason to die
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe.fileno(), f"+{os.getpid()}\n".encode())
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)

    def unregister_group(self, group: int) -> None:
        """Call it while the number cannot have been given to another process: before the group's leader is reaped."""
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed: the launcher cleans up alone
            self._pipe.write(f"-{group}\n".encode())
            self._pipe.flush()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        self._process.wait()

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin


def job_file(folder: Path) -> Path:
    """The file by which others find the job whose sockets lie in `folder`."""
    return folder.with_name(f"{folder.name}.json")


def remove_job_files(folder: Path) -> None:
    """Removes what a job left behind; the user's folder too when no other job uses it."""
    job_file(folder).unlink(missing_ok=True)
    draft_path(job_file(folder)).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _signal_all(groups: set[int], signum: int) -> set[int]:
    """Send a signal to process groups, and return those in which a process is left."""
    left = set()
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signum)
            left.add(group)
    return left


def end_groups(groups: set[int], patience: float = KILL_AFTER) -> None:
    """SIGTERM, then SIGKILL for those who are still there `patience` seconds later."""
    left = _signal_all(groups, signal.SIGTERM)
    _signal_all(left, signal.SIGCONT)  # a stopped process ends only when it runs
    deadline = time.monotonic() + patience
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = _signal_all(left, 0)
    _signal_all(left, signal.SIGKILL)


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):  # the launcher was killed in the middle of a line
            break
        (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    end_groups(groups)
    remove_job_files(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
