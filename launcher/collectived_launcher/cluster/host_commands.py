"""Commands on one host for `collectived up`, `down` and `run`: `host_commands VERB CLUSTER [JSON]` answers in JSON.

| verb | does | standard input |
|---|---|---|
| `up` | starts the supervisor, unless it runs, and waits until its daemons serve; JSON: a `Spec` | the secret |
| `down` | ends it; JSON: `{"now": …}`, whether without draining | |
| `state` | reports the part of a cluster that runs; CLUSTER may be empty where only one does | |
| `logs` | returns the logs of running daemons; JSON: `{"lines": …}`, how many of each | |
| `secret` | returns the secret of the running part, '' where nothing runs | |
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collectived_launcher.cluster import state
from collectived_launcher.cluster.spec import Spec
from collectived_launcher.cluster.supervisor import DRAIN_TIMEOUT, END_TIMEOUT, READY_TIMEOUT, STOPPED_STATES
from collectived_launcher.hosts.log_file import read_last_lines
from collectived_launcher.hosts.reaper import KILL_AFTER, remove_job_files
from collectived_proto.private_files import write_atomically

_POLL_INTERVAL = 0.03  # seconds between looks at what a supervisor has written
_SETTLED_STATES = {"serving", "drained"}
_MAX_FAILURES = 3  # ends in a row without serving, after which `up` waits no longer
_LOG_LINES = 6

CommandResult = dict[str, Any]


def up(cluster: str, spec: Spec, secret: str) -> CommandResult:
    """Starts what is to stay on this host."""
    folder = state.resolve_folder(cluster)
    with state.lock_host():
        known = state.read(folder)
        if known is not None and state.is_alive(known):
            same = Spec.from_json(known["spec"]) == spec
            away = [name for name, one in known["daemons"].items() if one["state"] in STOPPED_STATES]
            if same and away:
                _restart_stopped(known)
                answer = _await_daemons(folder)
                found = answer.get("daemons", {}).items()
                return {**answer, "daemons": {name: one for name, one in found if name in away}}
            return {"already": True, "same": same, "daemons": known["daemons"]}
        remove_job_files(folder)
        os.makedirs(folder.parent, mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700)
        (folder / state.LOGS).mkdir(mode=0o700)
        write_atomically(folder / state.SECRET, f"{secret}\n")
        supervisor = _start_supervisor(folder, spec)
        answer = _await_daemons(folder, supervisor)
        if "trouble" in answer:
            _stop_supervisor(state.read(folder), now=True)
        return answer


def _start_supervisor(folder: Path, spec: Spec) -> subprocess.Popen[str]:
    """Start the supervisor in a session of its own, outside of the process group of the caller."""
    with (folder / state.LOGS / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "collectived_launcher.cluster.supervisor", str(folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            text=True,
            cwd="/",
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(f"{spec.to_json()}\n")
    return process


def _restart_stopped(known: Mapping[str, Any]) -> None:
    """Has the supervisor start what was drained, or has failed for good, and waits until it has begun to."""
    descriptor = os.pidfd_open(known["pid"])
    try:
        if state.is_alive(known):
            signal.pidfd_send_signal(descriptor, signal.SIGUSR1)
    finally:
        os.close(descriptor)
    folder, deadline = state.resolve_folder(Spec.from_json(known["spec"]).name), time.monotonic() + READY_TIMEOUT
    while state.read(folder) == known and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL)


def _await_daemons(folder: Path, supervisor: subprocess.Popen[str] | None = None) -> CommandResult:
    deadline = time.monotonic() + READY_TIMEOUT
    while time.monotonic() < deadline:
        if supervisor is not None and supervisor.poll() is not None:
            why = _read_log_tail(folder, "supervisor")
            return {"trouble": f"the supervisor ended at once ({supervisor.returncode}){why}"}
        known = state.read(folder)
        if known is not None:
            if failed := [name for name, one in known["daemons"].items() if _is_hopeless(one)]:
                return {"trouble": _explain_failures(folder, known, failed)}
            if all(one["state"] in _SETTLED_STATES for one in known["daemons"].values()):
                break
        time.sleep(_POLL_INTERVAL)
    known = state.read(folder) or {"daemons": {}}
    bad = [f"{name} is {one['state']}" for name, one in known["daemons"].items() if one["state"] != "serving"]
    if bad or not known["daemons"]:
        return {"trouble": f"not all daemons serve within {READY_TIMEOUT:g} s: {'; '.join(bad) or 'none was started'}"}
    return {"already": False, "same": True, "daemons": known["daemons"]}


def _is_hopeless(one: Mapping[str, Any]) -> bool:
    """Whether a daemon that is to start will, as far as is known, never serve."""
    return bool(one["state"] == "failed" or one["failures"] >= _MAX_FAILURES)


def _explain_failures(folder: Path, known: Mapping[str, Any], names: Sequence[str]) -> str:
    """Why: the ends of their logs, which go with all else."""
    counts = {name: known["daemons"][name]["failures"] for name in names}
    return "\n".join(
        f"{name} failed {count} time{'s' if count > 1 else ''}{_read_log_tail(folder, name)}"
        for name, count in counts.items()
    )


def _read_log_tail(folder: Path, name: str) -> str:
    """The last lines of a log."""
    with contextlib.suppress(OSError):
        lines = read_last_lines(folder / state.LOGS / f"{name.replace(' ', '-')}.log", _LOG_LINES)
        if lines:
            return "".join(["; the end of its log:", *(f"\n    {line}" for line in lines)])
    return ""


def down(cluster: str, now: bool) -> CommandResult:
    """Ends what stays on this host; `cut`: what did not finish."""
    folder = state.resolve_folder(cluster)
    with state.lock_host():
        known = state.read(folder)
        if known is None or not state.is_alive(known):
            remove_job_files(folder)  # of one that was killed with its reaper
            return {"ran": False}
        with state.open_cut(folder) as told:
            killed = _stop_supervisor(known, now)
            told.seek(0)
            cut = told.read().splitlines()
        deadline = time.monotonic() + KILL_AFTER + END_TIMEOUT
        while folder.exists() and time.monotonic() < deadline:  # the reaper of one that had to be killed
            time.sleep(_POLL_INTERVAL)
        remove_job_files(folder)
        return {"ran": True, "killed": killed, "cut": cut}


def _stop_supervisor(known: Mapping[str, Any] | None, now: bool) -> bool:
    """Ends a supervisor; whether it had to be killed."""
    if known is None or not state.is_alive(known):
        return False
    descriptor = os.pidfd_open(known["pid"])
    try:
        if not state.is_alive(known):  # it ended in between, and another process has its number
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGINT if now else signal.SIGTERM)
        patience = 2 * END_TIMEOUT + KILL_AFTER + (0.0 if now else DRAIN_TIMEOUT)
        if select.select([descriptor], [], [], patience)[0]:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], KILL_AFTER)
        return True
    finally:
        os.close(descriptor)


def describe_running(cluster: str) -> CommandResult:
    """Describe the running part of a cluster."""
    found = [(folder, known) for folder, known in state.list_running() if cluster in ("", folder.name)]
    if len(found) != 1:
        names = ", ".join(folder.name for folder, _ in state.list_running())
        return {"running": False, "clusters": names}
    folder, known = found[0]
    return {"running": True, "name": folder.name, "daemons": known["daemons"], "spec": known["spec"]}


def read_secret(cluster: str) -> CommandResult:
    folder = state.resolve_folder(cluster)
    known = state.read(folder)
    return {"secret": (folder / state.SECRET).read_text().strip() if known and state.is_alive(known) else ""}


def read_logs(cluster: str, lines: int) -> CommandResult:
    """The last lines of each daemon and of the supervisor, by name; none where nothing runs."""
    folder = state.resolve_folder(cluster)
    if not state.is_alive(state.read(folder)):
        return {"logs": {}}
    paths = sorted((folder / state.LOGS).glob("*.log"))
    return {"logs": {path.stem.replace("-", " "): read_last_lines(path, lines) for path in paths}}


def main() -> int:
    verb, cluster, *rest = sys.argv[1:]
    about = json.loads(rest[0]) if rest else {}
    try:
        match verb:
            case "up":
                answer = up(cluster, Spec.from_json(rest[0]), sys.stdin.readline().strip())
            case "down":
                answer = down(cluster, bool(about.get("now")))
            case "secret":
                answer = read_secret(cluster)
            case "logs":
                answer = read_logs(cluster, int(about["lines"]))
            case "state":
                answer = describe_running(cluster)
            case _:
                answer = {"trouble": f"there is no command {verb!r}: expected up, down, state, logs or secret"}
    except (OSError, ValueError) as error:
        answer = {"trouble": str(error)}
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
