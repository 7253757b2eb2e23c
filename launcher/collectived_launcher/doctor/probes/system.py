"""The kernel, limits, memory, clock, and the folder of sockets. Changes of a trial are undone at once."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import platform
import resource
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from collectived_launcher.doctor.facts import Clock, Folder, Kernel, LimitFacts, MemoryFacts
from collectived_proto.ipc import arena, job_files

_SO_PEERPIDFD = 77  # Linux 6.5; not named by Python's socket module
_TIME_ERROR = 5  # of adjtimex: no time service keeps this clock
_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_TIMEX_BYTES = 512  # bytes, more than the structure has anywhere


def probe_kernel() -> Kernel:
    return Kernel(
        platform.system(),
        platform.release(),
        memfd=_error_text(_make_arena),
        pidfd=_error_text(_open_pidfd),
        peer_pidfd=_error_text(_get_peer_pidfd),
        seqpacket=_error_text(_pass_descriptor),
    )


def _error_text(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except (OSError, AttributeError) as error:  # the latter: not Linux
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # it was not tried: descriptors are short, which `limits` reports
        return str(error)
    return ""


def _make_arena() -> None:
    arena.create(0, 4096, readers_only=True).close()


def _open_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _get_peer_pidfd() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        os.close(here.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))


def _pass_descriptor() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        here.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [here.fileno()]))])
        _, descriptors, _, _ = socket.recv_fds(there, 1, 1)
        for descriptor in descriptors:
            os.close(descriptor)
        if len(descriptors) != 1:
            raise OSError("no descriptor came along")


def probe_limits() -> LimitFacts:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return LimitFacts(_or_none(soft), _or_none(hard), _or_none(locked), _count_tasks_left())


def _or_none(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _count_tasks_left() -> int | None:
    """None also where no file can be opened: a process that is out of descriptors must still get its limit."""
    left = []
    with contextlib.suppress(OSError):
        for folder in _control_groups("pids"):
            if (most := _read_number(folder / "pids.max")) is not None:
                left.append(most - (_read_number(folder / "pids.current") or 0))
    return max(0, min(left)) if left else None


def probe_memory(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> MemoryFacts:
    said = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(said[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limits, left = [], [free]
    for folder in _control_groups("memory", cgroups, own):
        limit = _read_first_number(folder / "memory.max", folder / "memory.limit_in_bytes")
        if limit is None or limit >= total:
            continue
        limits.append(limit)
        left.append(limit - (_read_first_number(folder / "memory.current", folder / "memory.usage_in_bytes") or 0))
    # As `default_memory_limit` of workers looks.
    files = [folder / "memory.max" for folder in _control_groups("memory", cgroups, own)]
    seen = [_read_number(file) for file in (*files, cgroups / "memory" / "memory.limit_in_bytes")]
    seen_limit = min((limit for limit in seen if limit is not None), default=None)
    return MemoryFacts(total, max(0, min(left)), min(limits, default=None), seen_limit)


def _control_groups(controller: str, root: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> list[Path]:
    """The folders of the control groups that this process is in, from its own up to the root; of either version."""
    found: list[Path] = []
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        mine = top / path.lstrip("/")
        found += [folder for folder in (mine, *mine.parents) if folder == top or top in folder.parents]
    return found


def _read_first_number(*files: Path) -> int | None:
    return next((found for file in files if (found := _read_number(file)) is not None), None)


def _read_number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # no such controller here, or no limit ("max")
        return int(file.read_text())
    return None


def probe_clock() -> Clock:
    """Asks the kernel, and changes nothing: for an empty request it only answers."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return Clock(None if state < 0 else state != _TIME_ERROR)


def probe_folder() -> Folder:
    """Where `job_files` would look; not made here."""
    path = job_files.runtime_path()
    # A job's name is `<user>-<pid>-<6 digits>`, the longest socket in its folder `coordinator.sock`.
    longest = f"{path}/{os.environ.get('USER', 'somebody')}-4194304-abcdef/coordinator.sock"
    parent = os.access(path.parent, os.W_OK | os.X_OK)
    size = len(os.fsencode(longest))
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return Folder(str(path), None, None, False, parent, os.getuid(), size)
    return Folder(
        str(path), seen.st_uid, stat.S_IMODE(seen.st_mode), stat.S_ISDIR(seen.st_mode), parent, os.getuid(), size
    )
