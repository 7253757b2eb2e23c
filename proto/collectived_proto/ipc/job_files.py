"""Where running jobs are found: one folder per user, one file per job in it.

The folder is `$XDG_RUNTIME_DIR/collectived`, else `/tmp/collectived-<uid>`; it belongs to the user and is 0700. A job's
file `<job>.json` is 0600 and is removed when the job ends; its sockets lie in the folder `<job>/` beside it.

The *system worker*, which systemd or Kubernetes keeps running for all users of the host, is found by its socket.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from collectived_proto.private_files import write_atomically

MAX_SOCKET_PATH = 107  # bytes that fit in sockaddr_un
SYSTEM_FOLDER = Path("/run/collectived")  # the same inside of containers, for workers send their clients paths in it
SYSTEM_SOCKET = "worker.sock"


@dataclass(frozen=True, slots=True)
class JobFile:
    """The data with which a process reaches a running job.

    Addresses are `unix:/path` or `host:port`; `page` is the link to its web page, with its token where it needs one, or
    ''; `away`: workers that do not serve now, for people.
    """

    job: str
    pid: int
    coordinator: str
    workers: tuple[str, ...]
    command: str = ""
    page: str = ""
    away: tuple[str, ...] = ()


def runtime_path() -> Path:
    """Return the path of this user's folder, which may not be there yet."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "collectived" if base and os.path.isdir(base) else Path(f"/tmp/collectived-{os.getuid()}")


def ensure_runtime_folder() -> Path:
    """This user's folder, created when missing.

    Raises:
        PermissionError: it exists and belongs to another user, or others may enter it.
    """
    folder = runtime_path()
    folder.mkdir(mode=0o700, exist_ok=True)
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be your directory (uid {os.getuid()}) with mode 0700, it has uid {seen.st_uid} and "
            f"mode {stat.S_IMODE(seen.st_mode):04o}; remove it or set XDG_RUNTIME_DIR"
        )
    return folder


def find_system_worker() -> str | None:
    """Address of the worker that serves this host, `unix:/path`; None where there is none.

    Whether a process listens there, and whether this user may call, shows when it is called.
    """
    path = SYSTEM_FOLDER / SYSTEM_SOCKET
    try:
        found = stat.S_ISSOCK(path.stat().st_mode)
    except PermissionError:  # its folder is there, and is not open to this user: better said than passed over
        found = True
    except OSError:
        found = False
    return f"unix:{path}" if found else None


def check_socket_path(path: str | os.PathLike[str]) -> str:
    """The path, if a Unix socket can have it.

    Raises:
        ValueError: it is longer than the kernel allows.
    """
    text = os.fspath(path)
    if len(os.fsencode(text)) > MAX_SOCKET_PATH:
        raise ValueError(
            f"socket path {text!r} has {len(os.fsencode(text))} bytes, the kernel allows {MAX_SOCKET_PATH}; "
            "choose a shorter folder (XDG_RUNTIME_DIR)"
        )
    return text


def write_job_file(job: JobFile, name: str = "") -> Path:
    """Write the job's file, whole or not at all; `name`: of the file and of the folder beside it, else the job's."""
    path = ensure_runtime_folder() / f"{name or job.job}.json"
    write_atomically(path, json.dumps(asdict(job)))
    return path


def list_starting_jobs() -> list[str]:
    """Names of jobs whose launcher lives and has not written their file yet: their daemons do not serve."""
    if not runtime_path().exists():
        return []
    names = [path.name for path in sorted(ensure_runtime_folder().iterdir()) if path.is_dir()]
    return [name for name in names if has_launcher(name) and not (runtime_path() / f"{name}.json").exists()]


def has_launcher(job: str) -> bool:
    """Whether the launcher of a job of that name lives on this host."""
    _, _, owner = job.rpartition("-")[0].rpartition("-")  # `<user>-<pid>-<random>`, as `launch` names them
    try:
        os.kill(int(owner), 0)
    except (OSError, ValueError):
        return False
    return True


def list_running_jobs() -> list[JobFile]:
    """The jobs whose launcher lives, by name. Files of dead ones are passed over, not removed.

    A job of which several hosts are this one has a file for each of them, and is listed once, with all their workers.
    """
    if not runtime_path().exists():  # nor is it made: in a container there may be no place to write
        return []
    found: dict[str, JobFile] = {}
    for path in sorted(ensure_runtime_folder().glob("*.json")):
        try:
            read = json.loads(path.read_text())
            job = JobFile(
                read["job"],
                read["pid"],
                read["coordinator"],
                tuple(read["workers"]),
                read["command"],
                read.get("page", ""),
                tuple(read.get("away", ())),
            )
            os.kill(job.pid, 0)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # vanished, half-made by hand, or its launcher is gone
            continue
        known = found.get(job.job)
        if known is not None:
            job = replace(known, workers=known.workers + job.workers, away=known.away + job.away)
        found[job.job] = job
    return list(found.values())
