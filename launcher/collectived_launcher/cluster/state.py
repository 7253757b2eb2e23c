"""The state of a cluster's part on one host: files in a folder that only its user may enter.

supervisor.json  the supervisor: its process and when that began, its spec, how each daemon is
secret           of the cluster, mode 0600
cut              what draining has cut, a line each, as long as it is being ended
logs/            a file per daemon, and the supervisor's own
*.sock, epoch    the daemons' own
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from collectived_proto.ipc import job_files
from collectived_proto.private_files import write_atomically

STATE_FILE, SECRET, LOGS, CUT_FILE = "supervisor.json", "secret", "logs", "cut"


def resolve_folder(cluster: str) -> Path:
    """
    Raises:
        OSError, ValueError: sockets cannot lie there.
    """
    folder = job_files.ensure_runtime_folder() / cluster
    job_files.check_socket_path(folder / "worker-9999.sock")
    return folder


def write(folder: Path, known: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    write_atomically(folder / STATE_FILE, json.dumps(known))


def read(folder: Path) -> dict[str, Any] | None:
    """Read the state that the supervisor has written; None where there is none."""
    try:
        found: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError):
        return None
    return found


def append_cut(folder: Path, lines: Sequence[str]) -> None:
    """Append the collectives that draining has cut, for readers of `open_cut`."""
    with (folder / CUT_FILE).open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


@contextlib.contextmanager
def open_cut(folder: Path) -> Iterator[IO[str]]:
    """A file that lists what draining has cut, even when the folder is gone: open it before anything is ended."""
    with (folder / CUT_FILE).open("a+") as file:
        yield file


def is_alive(known: Mapping[str, Any] | None) -> bool:
    """Whether that supervisor lives: a process of that number which began at that time."""
    return known is not None and get_start_time(int(known["pid"])) == known["began"]


def get_start_time(pid: int) -> int:
    """When a process began, in ticks since the machine did; 0 where there is none (any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def list_running() -> list[tuple[Path, dict[str, Any]]]:
    """Clusters of this user of which a part runs here."""
    if not job_files.runtime_path().exists():  # a reader does not make it
        return []
    found = [
        (path.parent, read(path.parent)) for path in sorted(job_files.ensure_runtime_folder().glob(f"*/{STATE_FILE}"))
    ]
    return [(folder, known) for folder, known in found if known is not None and is_alive(known)]


@contextlib.contextmanager
def lock_host() -> Iterator[None]:
    """One at a time starts or ends what stays on this host."""
    descriptor = os.open(job_files.ensure_runtime_folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
