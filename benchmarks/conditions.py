"""Where and when something was measured."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path


def shown(versions: Mapping[str, str] = {}) -> str:
    """One paragraph: date, processors, memory, kernel, versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    parts = [
        f"{datetime.now(UTC):%Y-%m-%d}",
        f"{len(os.sched_getaffinity(0))} processors ({_processor()})",
        f"{memory:.0f} GiB of memory",
        f"Linux {platform.release()}",
        f"Python {platform.python_version()}",
        *(f"{name} {version}" for name, version in sorted(versions.items(), key=lambda item: item[0].lower())),
    ]
    return f"{', '.join(parts)}."


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
