"""On how many cores a process runs; needs no compiled core."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def count_cores() -> int:
    """Count the cores that this process can use at the same time: by its affinity and by the quota of its cgroup."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *_quotas()]))


def _quotas() -> list[int]:
    found = []
    for folder in _own_cgroups():
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            found.append(int(quota) // int(period))
    return found


def _own_cgroups() -> list[Path]:
    """Return the folders of this process's cgroup and of all above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    names = [line[3:] for line in lines if line.startswith("0::/")]
    folder = _CGROUP / names[0].lstrip("/") if names else _CGROUP
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(_CGROUP))]


def may_use_all_cores() -> bool:
    """Whether nobody has narrowed this thread to some of the cores that its cgroup allows."""
    allowed = _read_cores(Path("/sys/devices/system/cpu/online"))
    for folder in _own_cgroups():
        if (cores := _read_cores(folder / "cpuset.cpus.effective")) is not None:
            allowed = cores
            break
    return allowed is not None and os.sched_getaffinity(0) == allowed


def _read_cores(path: Path) -> set[int] | None:
    """Read a list such as `0-3,8`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
