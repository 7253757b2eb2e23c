"""On how many cores a process runs; needs no compiled core.

Every join asks it a few times, so paths are plain text here.
"""

from __future__ import annotations

import os

_CGROUP = "/sys/fs/cgroup"


def count_cores() -> int:
    """Count the cores that this process can use at the same time: by its affinity and by the quota of its cgroup."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *_quotas()]))


def _quotas() -> list[int]:
    found = []
    for folder in _own_cgroups():
        try:
            with open(f"{folder}/cpu.max") as file:
                quota, period = file.read().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            found.append(int(quota) // int(period))
    return found


def _own_cgroups() -> list[str]:
    """Return the folders of this process's cgroup and of all above it."""
    try:
        with open("/proc/self/cgroup") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    names = [line[3:] for line in lines if line.startswith("0::/")]
    parts = names[0].strip("/").split("/") if names and names[0] != "/" else []
    return ["/".join((_CGROUP, *parts[:depth])) for depth in range(len(parts), -1, -1)]


def may_use_all_cores() -> bool:
    """Whether this thread may run on all cores that its cgroup allows."""
    allowed = _read_cores("/sys/devices/system/cpu/online")
    for folder in _own_cgroups():
        if (cores := _read_cores(f"{folder}/cpuset.cpus.effective")) is not None:
            allowed = cores
            break
    return allowed is not None and os.sched_getaffinity(0) == allowed


def _read_cores(path: str) -> set[int] | None:
    """Read a list such as `0-3,8`."""
    try:
        with open(path) as file:
            text = file.read().strip()
    except OSError:
        return None
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
