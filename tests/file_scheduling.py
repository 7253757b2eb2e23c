"""How files of tests are dealt out to processes side by side: as pytest-xdist does, but for a process that crashes."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """Gives out again only what a crashed process has left to do.

    pytest-xdist gives out the files again, too, that it has completed. A process asks for a file when it has completed
    a test, and does not run its last test before it has another one. Files without a test would leave all waiting.
    """

    def remove_node(self, node: Any) -> str | None:
        """Take away a process; the test that it was at, if it had any left."""
        assigned = self.assigned_work.get(node, {})
        for file in [file for file, tests in assigned.items() if all(tests.values())]:
            del assigned[file]
        crashed: str | None = super().remove_node(node)
        return crashed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    """Deal out files; None: as the command line says."""
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None
