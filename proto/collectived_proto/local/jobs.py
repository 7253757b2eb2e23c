"""Where running jobs are found: one folder per user, one file per job in it.

The folder is `$XDG_RUNTIME_DIR/collectived`, else `/tmp/collectived-<uid>`; it belongs to the user and is 0700. A job's
file `<job>.json` is 0600 and is removed when the job ends; its sockets lie in the folder `<job>/` beside it.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_SOCKET_PATH = 107  # bytes that fit in sockaddr_un


@dataclass(frozen=True, slots=True)
class JobFile:
    """What anybody needs in order to reach a running job. Addresses are `unix:/path` or `host:port`; `page` is the link
    to its web page, with its token where it needs one, or ''."""

    job: str
    pid: int
    coordinator: str
    workers: tuple[str, ...]
    command: str = ""
    page: str = ""


def runtime_folder() -> Path:
    """This user's folder, created when missing.

    Raises:
        PermissionError: it exists and belongs to somebody else, or others may enter it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "collectived" if base and os.path.isdir(base) else Path(f"/tmp/collectived-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a directory of yours (uid {os.getuid()}) with mode 0700, it has uid {seen.st_uid} and "
            f"mode {stat.S_IMODE(seen.st_mode):04o}; remove it or set XDG_RUNTIME_DIR"
        )
    return folder


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


def publish(job: JobFile, name: str = "") -> Path:
    """Writes the job's file, whole or not at all; `name`: of the file and of the folder beside it, else the job's."""
    path = runtime_folder() / f"{name or job.job}.json"
    draft = path.with_suffix(".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(job), file)
    os.replace(draft, path)
    return path


def running() -> list[JobFile]:
    """The jobs whose launcher lives, by name. Files of dead ones are passed over, not removed."""
    found = []
    for path in sorted(runtime_folder().glob("*.json")):
        try:
            read = json.loads(path.read_text())
            job = JobFile(
                read["job"],
                read["pid"],
                read["coordinator"],
                tuple(read["workers"]),
                read["command"],
                read.get("page", ""),
            )
            os.kill(job.pid, 0)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # vanished, half-made by hand, or its launcher is gone
            continue
        found.append(job)
    return found
