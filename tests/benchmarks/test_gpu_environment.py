"""What a report about GPUs says it was measured with."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.gpu_environment import driver_version

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version: 12.3.0\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@builder)\n"


@pytest.mark.parametrize(("said", "version"), [(CLOSED, "535.183.01"), (OPEN, "580.159.04"), ("nothing", "not known")])
def test_the_driver_says_its_version(tmp_path: Path, said: str, version: str) -> None:
    (tmp_path / "version").write_text(said)
    assert driver_version(tmp_path / "version") == version


def test_without_a_driver_its_version_is_not_known(tmp_path: Path) -> None:
    assert driver_version(tmp_path / "version") == "not known"
