"""The logs of a job's daemons, for `collectived logs`: files in the job's folder on the host of `collectived launch`.

    <job>/daemon-logs/<host>/<daemon>.log     with --log-dir a link to the file there

They go with the job's folder when the job ends.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from collectived_launcher.hosts.log_file import KEPT_BYTES, LogFile, read_last_lines
from collectived_proto.ipc import job_files

_LOGS = "daemon-logs"


def open_daemon_log(folder: Path, host: str, daemon: str, elsewhere: Path | None) -> LogFile:
    """Where a daemon's lines go.

    Args:
        folder: the job's.
        elsewhere: the daemon's file in --log-dir, which has all lines; None: the latest are kept in the job's folder.

    Raises:
        OSError: it cannot be opened.
    """
    path = folder / _LOGS / host / f"{daemon.replace(' ', '-')}.log"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if elsewhere is None:
        return LogFile(path, KEPT_BYTES)
    with contextlib.suppress(FileExistsError):
        path.symlink_to(elsewhere.resolve())
    return LogFile(elsewhere)


def list_logged_jobs() -> dict[str, Path]:
    """The folders of this user's jobs whose `collectived launch` runs on this host, by job."""
    if not job_files.runtime_path().exists():
        return {}
    folders = sorted(job_files.ensure_runtime_folder().iterdir())
    return {one.name: one for one in folders if (one / _LOGS).is_dir() and job_files.has_launcher(one.name)}


def read_job_logs(folder: Path, lines: int) -> dict[str, dict[str, list[str]]]:
    """The latest lines by host and daemon."""
    hosts = sorted((folder / _LOGS).iterdir())
    return {
        host.name: {path.stem.replace("-", " "): read_last_lines(path, lines) for path in sorted(host.glob("*.log"))}
        for host in hosts
    }
