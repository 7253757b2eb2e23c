"""The specification of one host of a cluster, for its supervisor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collectived_launcher.launch.daemons import join_host_port
from collectived_launcher.launch.job import COORDINATOR
from collectived_proto.config.flags import NO_TLS_FLAGS


@dataclass(frozen=True, slots=True)
class Spec:
    """One host's part of a cluster.

    name: of the cluster. host: as its file names it. tasks: numbers of its workers. leads: it runs the coordinator.
    coordinator_at: `host:port` at which other hosts reach that; '' where there are none. address: by which other hosts
    reach this one; '' where there are none. coordinator, worker: flags of those daemons. restarts: how often each may
    be started again within five minutes. source: the cluster file. slots: clients that `run` starts per worker.
    """

    name: str
    host: str
    tasks: tuple[int, ...]
    leads: bool
    coordinator_at: str = ""
    address: str = ""
    coordinator: tuple[str, ...] = ()
    worker: tuple[str, ...] = ()
    restarts: int = 5
    source: str = ""
    slots: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        found: Any = {
            key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(text).items()
        }
        return cls(**found)

    def build_daemon_commands(self, folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
        """(name, words after the interpreter's) of each daemon, in the order in which they start."""
        both = ("--attached", "--config", "none", *NO_TLS_FLAGS, "--job", self.name)
        here = f"unix:{folder}/coordinator.sock"
        if self.leads:
            listen = [here, *([self.coordinator_at] if self.coordinator_at else [])]
            words = [word for address in listen for word in ("--listen", address)]
            yield COORDINATOR, ("coordinator", *both, *words, "--journal", f"{folder}/epoch", *self.coordinator)
        for task in self.tasks:
            coordinator = here if self.leads else self.coordinator_at
            place = ("--task", str(task), "--folder", str(folder), "--coordinator", coordinator)
            links = ("--link-listen", join_host_port(self.address, 0), "--host", self.host) if self.address else ()
            yield f"worker {task}", ("worker", *both, *place, *links, *self.worker)
