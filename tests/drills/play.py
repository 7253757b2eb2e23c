"""Plays cells, one after the other, on clusters that are kept as long as nothing in them has failed."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.drills.cell import Cell
from tests.drills.cluster import Cluster
from tests.drills.hosts import NotPermitted
from tests.drills.limits import Hang, Pace
from tests.drills.scene import Scene

_DEFECTS = ("Traceback", "a defect of collectived", "was never retrieved")


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a cell.

    failure: what was not as promised; '' where all was. hung: it reached its cap. heard: seconds from the fault until
    the last rank had heard. error, named: the class of what they heard, and the ranks that it names. late: how late the
    machine was, in seconds. notes: what else was measured. skipped: why it was not played at all.
    """

    cell: Cell
    failure: str
    hung: bool
    seconds: float
    heard: float | None = None
    error: str = ""
    named: tuple[int, ...] = ()
    late: float = 0.0
    notes: tuple[str, ...] = ()
    skipped: str = ""


class Stage:
    """Clusters by kind; a context manager that leaves nothing behind.

    `few`: all cells, but for those that are apart, are played on three linked workers, so that few daemons start.
    """

    def __init__(self, seed: int = 1, few: bool = False) -> None:
        self._seed = seed
        self._few = few
        self._clusters: dict[tuple[int, bool, bool], Cluster] = {}
        self._forbidden = ""  # why hosts cannot be had

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as ending:
            for cluster in self._clusters.values():
                ending.callback(cluster.close)
            self._clusters.clear()

    def play(self, cell: Cell) -> Result:
        """Plays a cell; never raises for what happens in it."""
        begin = time.monotonic()
        with Pace() as pace:
            kind = self._kind(cell)
            if cell.apart and self._forbidden:
                return Result(cell, "", False, 0.0, skipped=self._forbidden)
            try:
                if kind not in self._clusters:
                    self._clusters[kind] = Cluster(*kind)
            except NotPermitted as error:
                self._forbidden = str(error)
                return Result(cell, "", False, 0.0, skipped=self._forbidden)
            except Exception as error:
                return Result(cell, f"the daemons did not start: {error}", False, time.monotonic() - begin)
            cluster = self._clusters[kind]
            begin = time.monotonic()
            said = {daemon.pid: len(daemon.log) for daemon in cluster.daemons}
            scene = Scene(cell, cluster, self._seed, pace)
            failure, hung = "", False
            try:
                scene.begin()
                cell.drill(scene)
                failure = "; ".join(scene.violations())
                scene.end()
                cluster.keep_spares()
            except Exception as error:
                hung = isinstance(error, Hang)
                failure = "; ".join([failure] * bool(failure) + [f"{error or type(error).__name__}", _where(error)])
            logs = [line for daemon in cluster.daemons for line in daemon.log[said.get(daemon.pid, 0) :]]
            defects = find_defects(logs)
            if defects:
                failure = "; ".join([failure] * bool(failure) + [f"a daemon said {defects[0]!r}"])
            if failure:
                failure += f"\n  the daemons said:\n{''.join(f'    {line}' for line in logs[-20:])}"
                self._tear_down(kind, scene)
            return Result(
                cell,
                failure,
                hung,
                time.monotonic() - begin,
                scene.heard,
                scene.error,
                scene.named,
                pace.late,
                tuple(scene.notes),
            )

    def _kind(self, cell: Cell) -> tuple[int, bool, bool]:
        """How many workers, whether they are linked, and whether they are apart."""
        return (3, True, False) if self._few and not cell.apart else (cell.workers, cell.linked, cell.apart)

    def _tear_down(self, kind: tuple[int, bool, bool], scene: Scene) -> None:
        """What has failed once is not used again."""
        scene.abandon()
        cluster = self._clusters.pop(kind)
        for daemon in cluster.daemons:
            daemon.go_on()
        with contextlib.suppress(Exception):
            cluster.close()


def find_defects(log: Iterable[str]) -> list[str]:
    """Lines of a daemon's log that tell of a defect."""
    return [line.strip() for line in log if any(word in line for word in _DEFECTS)]


def _where(error: Exception) -> str:
    """The line of the drill at which it failed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/cells/" in frame.filename]
    return f"(at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else "(in the scene)"
