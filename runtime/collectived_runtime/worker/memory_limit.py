"""How much memory a worker takes at most where nobody says it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def default_memory_limit(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Half of the memory that this process may use: of the machine's, or of the least that a cgroup above it has."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in (*_limits_above(cgroups, own), cgroups / "memory" / "memory.limit_in_bytes"):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such controller here, or no limit ("max")
            continue
    return min(limits) // 2


def _limits_above(cgroups: Path, own: Path) -> Iterator[Path]:
    """Where version 2 keeps the limits: of the process's own cgroup, as `MemoryMax=` sets it, and of those above it.

    In a container its own is the root, as far as it can see.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for name in [line.removeprefix("0::/") for line in lines if line.startswith("0::/")] or [""]:
        folder = cgroups / name
        for above in (folder, *folder.parents):
            if above == cgroups or cgroups in above.parents:
                yield above / "memory.max"
