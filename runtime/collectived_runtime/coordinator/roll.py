"""The roll: which number each host's worker has, for workers that bring none (a DaemonSet cannot number its pods).

A host keeps its number for as long as the roll is kept, so ranks keep their order: in the file beside the journal, over
restarts of the coordinator. Numbers are small and none is given twice, not even one whose host has gone for good.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from collectived_runtime.coordinator.journal import replace


def number(host: str, known: Mapping[str, int], attached: Mapping[int, str]) -> int:
    """The number for a host's worker.

    Args:
        known: numbers by host that were given before. attached: hosts by number of the workers that are here.
    """
    task = known.get(host)
    if task is not None and attached.get(task, host) == host:
        return task
    taken = {*known.values(), *attached}
    return next(task for task in itertools.count() if task not in taken)


class Roll:
    """Args: path: of the file, which is made at the first entry; None: kept in memory alone.

    Raises:
        ValueError: the file is none. OSError: it cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known = _read(path) if path else {}

    def enlist(self, host: str, attached: Mapping[int, str]) -> int:
        """The number for a host's worker, which is on file before it is given.

        Raises:
            OSError: the file cannot be written.
        """
        task = number(host, self._known, attached)
        if self._known.get(host) != task:
            known = {**self._known, host: task}
            if self._path:
                replace(self._path, json.dumps(known, indent=1) + "\n")
            self._known = known
        return task


def _read(path: Path) -> dict[str, int]:
    try:
        read = json.loads(path.read_text())
        return {str(host): int(task) for host, task in read.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path} is not the roll of workers, JSON such as {{"host": 0}} ({error}): remove it if hosts may get '
            "other numbers"
        ) from None
