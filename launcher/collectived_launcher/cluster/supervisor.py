"""The supervisor: keeps the daemons of one host of a cluster running, for as long as that is up.

A daemon that dies is started again after a pause that doubles (`restarts`), so often and no more. A worker that ends
with status 0 was drained: it stays away. SIGUSR1 starts again what was drained or has failed for good; SIGTERM drains
the workers and ends everything; SIGINT ends it at once. Should the supervisor itself be killed, its reaper ends the
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
from collectived_launcher.cluster.file import MAX_DRAIN_SECONDS
from collectived_launcher.cluster.spec import Spec
from collectived_launcher.hosts.local import LocalHost
from collectived_launcher.hosts.log_file import KEPT_BYTES, LogFile
from collectived_launcher.hosts.loop import Loop
from collectived_launcher.hosts.output import LogsOnly
from collectived_launcher.launch import restarts
from collectived_launcher.launch.child import Daemon
from collectived_launcher.launch.daemons import DAEMON_COMMAND, await_end
from collectived_launcher.launch.job import COORDINATOR
from collectived_launcher.launch.restarts import DaemonRestartState
from collectived_proto.ipc import job_files

READY_TIMEOUT = 30.0  # seconds from a daemon's start until it serves
END_TIMEOUT = 5.0  # from the end of its standard input to its own
DRAIN_TIMEOUT = MAX_DRAIN_SECONDS + 30.0  # with what a worker takes beside its `drain_seconds`


STOPPED_STATES = ("drained", "failed")


class Supervisor:
    """Of one host's part of a cluster, whose files lie in `folder`."""

    def __init__(self, loop: Loop, folder: Path, spec: Spec, secret: str) -> None:
        self._loop, self._folder, self._spec, self._secret = loop, folder, spec, secret
        self._local_host = LocalHost(loop, folder)
        self._terminal = LogsOnly()
        self._commands = dict(spec.build_daemon_commands(folder))
        self._daemons: dict[str, Daemon] = {}
        self._restart_states = {name: DaemonRestartState() for name in self._commands}
        self._states = dict.fromkeys(self._commands, "starting")
        self._restart_counts = dict.fromkeys(self._commands, 0)
        self._failures = dict.fromkeys(self._commands, 0)  # since it served last
        self._published = False
        self._restart_requested = False
        signal.signal(signal.SIGUSR1, self._on_restart_signal)  # wakes the loop

    def run(self) -> None:
        """Run until a signal ends it."""
        self._local_host.open(lambda: None)
        try:
            for name in self._commands:
                self._start(name)
            self._write_state()
            while not self._loop.signals:
                due = min(watched.next_deadline for watched in self._restart_states.values())
                self._loop.run_once(None if due == float("inf") else max(0.0, due - time.monotonic()))
                if self._restart_requested:
                    self._restart_stopped()
                self._check_daemons(time.monotonic())
            self._stop_daemons(drain=self._loop.signals[0] == signal.SIGTERM)
        finally:
            self._local_host.close()

    def _start(self, name: str) -> None:
        log = LogFile(self._folder / state.LOGS / f"{name.replace(' ', '-')}.log", KEPT_BYTES)
        daemon = self._daemons[name] = Daemon(name, self._terminal, log)
        daemon.ready_callback = partial(self._on_daemon_ready, name)
        daemon.exit_callback = partial(self._on_daemon_exit, name)
        daemon.start(self._local_host, (*DAEMON_COMMAND, *self._commands[name]), self._secret, {})

    def _on_restart_signal(self, signum: int, frame: FrameType | None) -> None:
        self._restart_requested = True

    def _restart_stopped(self) -> None:
        self._restart_requested = False
        for name in [name for name, how in self._states.items() if how in STOPPED_STATES]:
            self._restart_states[name] = restarts.record_restart(DaemonRestartState(), READY_TIMEOUT, time.monotonic())
            self._failures[name] = 0
            self._states[name] = "starting"
            self._start(name)
        self._write_state()

    def _on_daemon_ready(self, name: str) -> None:
        self._restart_states[name] = restarts.record_ready(self._restart_states[name])
        self._failures[name] = 0
        workers = [daemon for name, daemon in self._daemons.items() if name != COORDINATOR]
        self._published = self._published or bool(workers) and all(daemon.ready_info for daemon in workers)
        self._set_state(name, "serving")

    def _publish(self) -> None:
        """Publish which workers serve, and which do not now."""
        spec = self._spec
        workers = {name: how for name, how in self._states.items() if name != COORDINATOR}
        addresses = tuple(self._daemons[name].address for name, how in workers.items() if how == "serving")
        away = tuple(f"{name} ({how})" for name, how in workers.items() if how != "serving")
        coordinator = f"unix:{self._folder}/coordinator.sock" if spec.leads else spec.coordinator_at
        command = f"collectived up {spec.source}"
        found = job_files.JobFile(spec.name, os.getpid(), coordinator, addresses, command, away=away)
        job_files.write_job_file(found, self._folder.name)

    def _on_daemon_exit(self, name: str) -> None:
        daemon = self._daemons[name]
        how = daemon.describe_end()
        if daemon.status == 0 and daemon.ready_info and name != COORDINATOR:
            self._restart_states[name] = DaemonRestartState()
            self._say(f"{daemon.describe()} was drained, and has ended")
            self._set_state(name, "drained")
            return
        self._failures[name] += 1
        again = restarts.record_exit(self._restart_states[name], self._spec.restarts, random.random(), time.monotonic())
        if again is None:
            self._restart_states[name] = DaemonRestartState()
            self._say(f"{daemon.describe()} died: {how}; that is all that it is started again")
            self._set_state(name, "failed")
            return
        self._restart_states[name] = again
        self._restart_counts[name] += 1
        self._say(f"{daemon.describe()} died: {how}; starting it again ({self._restart_counts[name]})")
        self._set_state(name, "restarting")

    def _check_daemons(self, now: float) -> None:
        """Daemons whose pause is over, and those that do not come to serve."""
        for name, watched in list(self._restart_states.items()):
            if watched.restart_at is not None and watched.restart_at <= now:
                self._restart_states[name] = restarts.record_restart(watched, READY_TIMEOUT, now)
                self._start(name)
                self._write_state()
            elif watched.ready_deadline is not None and watched.ready_deadline <= now:
                self._restart_states[name] = restarts.record_ready_timeout(watched)
                self._daemons[name].send(signal.SIGKILL)

    def _stop_daemons(self, drain: bool) -> None:
        """Workers first; the coordinator is there as long as they drain."""
        for name in self._states:
            self._states[name] = "ending"
        self._write_state()
        workers = [daemon for name, daemon in self._daemons.items() if name != COORDINATOR]
        for daemon in self._daemons.values():
            daemon.exit_callback = lambda: None
        if drain:
            for daemon in workers:
                daemon.send(signal.SIGTERM)
            await_end(self._loop, workers, DRAIN_TIMEOUT)
            self._report_cut(workers)
        for group in (workers, [daemon for name, daemon in self._daemons.items() if name == COORDINATOR]):
            for daemon in group:
                daemon.close_stdin()
            if not await_end(self._loop, group, END_TIMEOUT):
                for daemon in group:
                    daemon.send(signal.SIGKILL)
                await_end(self._loop, group)

    def _report_cut(self, workers: Sequence[Daemon]) -> None:
        """Report the collectives that draining has cut, to the process that ends this one, and in the log."""
        from google.protobuf.json_format import Parse  # only at the end

        from collectived_launcher.drain import format_losses, merge_replies
        from collectived_proto.v1.status_pb2 import DrainReply

        replies = [Parse(worker.drain_reply_json, DrainReply()) for worker in workers if worker.drain_reply_json]
        late = [
            f"{worker.describe()} has not drained within {DRAIN_TIMEOUT:g} s" for worker in workers if worker.is_alive
        ]
        cut = [*format_losses(merge_replies(replies)), *late]
        for line in cut:
            self._say(line)
        state.append_cut(self._folder, cut)

    def _set_state(self, name: str, to: str) -> None:
        self._states[name] = to
        if self._published:  # first: a worker that is said to serve is one that `run` finds
            self._publish()
        self._write_state()

    def _write_state(self) -> None:
        daemons: dict[str, Any] = {
            name: {
                "state": self._states[name],
                "pid": daemon.pid if daemon.is_alive else 0,
                "address": daemon.address if daemon.ready_info else "",
                "restarts": self._restart_counts[name],
                "failures": self._failures[name],
                "said": daemon.stderr_tail[-1] if daemon.stderr_tail else "",
            }
            for name, daemon in self._daemons.items()
        }
        pid = os.getpid()
        known = {"pid": pid, "began": state.get_start_time(pid), "spec": self._spec.to_json(), "daemons": daemons}
        state.write(self._folder, known)

    def _say(self, text: str) -> None:
        self._terminal.say(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}")


def main() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the user who started it logs out
    folder = Path(sys.argv[1])
    spec = Spec.from_json(sys.stdin.readline())
    secret = (folder / state.SECRET).read_text().strip()
    with Loop() as loop:
        Supervisor(loop, folder, spec, secret).run()


if __name__ == "__main__":
    main()
