"""The supervisor: keeps the daemons of one host of a cluster running, for as long as that is up.

A daemon that dies is started again after a pause that doubles (`restarts`), so often and no more. A worker that ends
with status 0 was drained: it stays away. SIGUSR1 starts again what was drained or has failed for good; SIGTERM drains
the workers and ends everything; SIGINT ends it at once. Should the supervisor itself be killed, its keeper ends the
daemons and removes every trace.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from collectived_launcher.cluster import state
from collectived_launcher.cluster.file import LONGEST_DRAIN
from collectived_launcher.cluster.spec import Spec
from collectived_launcher.launch import restarts
from collectived_launcher.launch.child import Daemon
from collectived_launcher.launch.daemons import DAEMON, await_end
from collectived_launcher.launch.here import Here
from collectived_launcher.launch.job import COORDINATOR
from collectived_launcher.launch.loop import Loop
from collectived_launcher.launch.output import Terminal
from collectived_launcher.launch.restarts import Watched
from collectived_proto.local import jobs

READY_WITHIN = 30.0  # seconds from a daemon's start until it serves
ENDED_WITHIN = 5.0  # from the end of its standard input to its own
DRAINED_WITHIN = LONGEST_DRAIN + 30.0  # with what a worker takes beside its `drain_seconds`


AWAY = ("drained", "failed")


class Supervisor:
    """Of one host's part of a cluster, whose files lie in `folder`."""

    def __init__(self, loop: Loop, folder: Path, spec: Spec, secret: str) -> None:
        self._loop, self._folder, self._spec, self._secret = loop, folder, spec, secret
        self._here = Here(loop, folder)
        self._terminal = Terminal()
        self._words = dict(spec.daemons(folder))
        self._daemons: dict[str, Daemon] = {}
        self._watched = {name: Watched() for name in self._words}
        self._states = dict.fromkeys(self._words, "starting")
        self._counts = dict.fromkeys(self._words, 0)
        self._failures = dict.fromkeys(self._words, 0)  # since it served last
        self._published = False
        self._revive = False
        signal.signal(signal.SIGUSR1, self._revived)  # wakes the loop

    def run(self) -> None:
        """Until it is told to end."""
        self._here.open(lambda: None)
        try:
            for name in self._words:
                self._start(name)
            self._tell()
            while not self._loop.signals:
                due = min(watched.wakeup for watched in self._watched.values())
                self._loop.turn(None if due == float("inf") else max(0.0, due - time.monotonic()))
                if self._revive:
                    self._start_what_stays_away()
                self._tend(time.monotonic())
            self._end(drain=self._loop.signals[0] == signal.SIGTERM)
        finally:
            self._here.close()

    def _start(self, name: str) -> None:
        log = self._folder / state.LOGS / f"{name.replace(' ', '-')}.log"
        daemon = self._daemons[name] = Daemon(name, self._terminal, log)
        daemon.became_ready = partial(self._ready, name)
        daemon.when_ended = partial(self._ended, name)
        daemon.start(self._here, (*DAEMON, *self._words[name]), self._secret, {})

    def _revived(self, signum: int, frame: FrameType | None) -> None:
        self._revive = True

    def _start_what_stays_away(self) -> None:
        self._revive = False
        for name in [name for name, how in self._states.items() if how in AWAY]:
            self._watched[name] = restarts.started(Watched(), READY_WITHIN, time.monotonic())
            self._failures[name] = 0
            self._states[name] = "starting"
            self._start(name)
        self._tell()

    def _ready(self, name: str) -> None:
        self._watched[name] = restarts.ready(self._watched[name])
        self._failures[name] = 0
        self._change(name, "serving")
        workers = [daemon for name, daemon in self._daemons.items() if name != COORDINATOR]
        if workers and all(daemon.ready for daemon in workers) and not self._published:
            self._published = True
            self._publish()

    def _publish(self) -> None:
        """Tells others which workers serve, and which do not now."""
        spec = self._spec
        workers = {name: how for name, how in self._states.items() if name != COORDINATOR}
        addresses = tuple(self._daemons[name].address for name, how in workers.items() if how == "serving")
        away = tuple(f"{name} ({how})" for name, how in workers.items() if how != "serving")
        coordinator = f"unix:{self._folder}/coordinator.sock" if spec.leads else spec.coordinator_at
        command = f"collectived up {spec.source}"
        found = jobs.JobFile(spec.name, os.getpid(), coordinator, addresses, command, away=away)
        jobs.publish(found, self._folder.name)

    def _ended(self, name: str) -> None:
        daemon = self._daemons[name]
        how = daemon.describe_end()
        if daemon.status == 0 and daemon.ready and name != COORDINATOR:
            self._watched[name] = Watched()
            self._say(f"{daemon.describe()} was drained, and has ended")
            self._change(name, "drained")
            return
        self._failures[name] += 1
        again = restarts.ended(self._watched[name], self._spec.restarts, random.random(), time.monotonic())
        if again is None:
            self._watched[name] = Watched()
            self._say(f"{daemon.describe()} died: {how}; that is all that it is started again")
            self._change(name, "failed")
            return
        self._watched[name] = again
        self._counts[name] += 1
        self._say(f"{daemon.describe()} died: {how}; starting it again ({self._counts[name]})")
        self._change(name, "restarting")

    def _tend(self, now: float) -> None:
        """Daemons whose pause is over, and those that do not come to serve."""
        for name, watched in list(self._watched.items()):
            if watched.due is not None and watched.due <= now:
                self._watched[name] = restarts.started(watched, READY_WITHIN, now)
                self._start(name)
                self._tell()
            elif watched.ready_by is not None and watched.ready_by <= now:
                self._watched[name] = restarts.late(watched)
                self._daemons[name].send(signal.SIGKILL)

    def _end(self, drain: bool) -> None:
        """Workers first; the coordinator is there as long as they drain."""
        for name in self._states:
            self._states[name] = "ending"
        self._tell()
        workers = [daemon for name, daemon in self._daemons.items() if name != COORDINATOR]
        for daemon in self._daemons.values():
            daemon.when_ended = lambda: None
        if drain:
            for daemon in workers:
                daemon.send(signal.SIGTERM)
            await_end(self._loop, workers, DRAINED_WITHIN)
            self._tell_cut(workers)
        for group in (workers, [daemon for name, daemon in self._daemons.items() if name == COORDINATOR]):
            for daemon in group:
                daemon.end_in_order()
            if not await_end(self._loop, group, ENDED_WITHIN):
                for daemon in group:
                    daemon.send(signal.SIGKILL)
                await_end(self._loop, group)

    def _tell_cut(self, workers: Sequence[Daemon]) -> None:
        """What draining has cut, for whoever ends us, and for our log."""
        from google.protobuf.json_format import Parse  # only at the end

        from collectived_launcher.drain.show import losses
        from collectived_launcher.drain.together import together
        from collectived_proto.v1.status_pb2 import DrainReply

        replies = [Parse(worker.drained, DrainReply()) for worker in workers if worker.drained]
        late = [
            f"{worker.describe()} has not drained within {DRAINED_WITHIN:g} s" for worker in workers if worker.alive
        ]
        cut = [*losses(together(replies)), *late]
        for line in cut:
            self._say(line)
        state.add_cut(self._folder, cut)

    def _change(self, name: str, to: str) -> None:
        self._states[name] = to
        self._tell()
        if self._published:
            self._publish()

    def _tell(self) -> None:
        daemons: dict[str, Any] = {
            name: {
                "state": self._states[name],
                "pid": daemon.pid if daemon.alive else 0,
                "address": daemon.address if daemon.ready else "",
                "restarts": self._counts[name],
                "failures": self._failures[name],
                "said": daemon.last_words[-1] if daemon.last_words else "",
            }
            for name, daemon in self._daemons.items()
        }
        pid = os.getpid()
        known = {"pid": pid, "began": state.began(pid), "spec": self._spec.to_json(), "daemons": daemons}
        state.write(self._folder, known)

    def _say(self, text: str) -> None:
        self._terminal.say(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}")


def main() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # whoever started us logs out
    folder = Path(sys.argv[1])
    spec = Spec.from_json(sys.stdin.readline())
    secret = (folder / state.SECRET).read_text().strip()
    with Loop() as loop:
        Supervisor(loop, folder, spec, secret).run()


if __name__ == "__main__":
    main()
