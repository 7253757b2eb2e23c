"""What is done on one host for `collectived up`, `down` and `run`: `there.py VERB CLUSTER [JSON]`; answers with JSON.

| verb | does | standard input |
|---|---|---|
| `up` | starts the supervisor, unless it runs, and waits until its daemons serve; JSON: a `Spec` | the secret |
| `down` | ends it; JSON: `{"now": …}`, whether without draining | |
| `state` | tells what runs; CLUSTER may be empty where only one does | |
| `secret` | tells the secret of what runs here, '' where nothing does | |
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
from collectived_launcher.cluster.supervisor import AWAY, DRAINED_WITHIN, ENDED_WITHIN, READY_WITHIN
from collectived_launcher.launch.keeper import PATIENCE, remove_traces

_LOOK = 0.03  # seconds between looks at what a supervisor has written
_SETTLED = {"serving", "drained"}
_ENOUGH_FAILURES = 3  # ends in a row without serving, after which `up` waits no longer
_LOG_LINES = 6

Answer = dict[str, Any]


def up(cluster: str, spec: Spec, secret: str) -> Answer:
    """Starts what is to stay on this host."""
    folder = state.folder_of(cluster)
    with state.alone():
        known = state.read(folder)
        if known is not None and state.living(known):
            same = Spec.from_json(known["spec"]) == spec
            away = [name for name, one in known["daemons"].items() if one["state"] in AWAY]
            if same and away:
                _revive(known)
                answer = _await(folder)
                found = answer.get("daemons", {}).items()
                return {**answer, "daemons": {name: one for name, one in found if name in away}}
            return {"already": True, "same": same, "daemons": known["daemons"]}
        remove_traces(folder)
        os.makedirs(folder.parent, mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700)
        (folder / state.LOGS).mkdir(mode=0o700)
        state.private(folder / state.SECRET, f"{secret}\n")
        supervisor = _start(folder, spec)
        answer = _await(folder, supervisor)
        if "trouble" in answer:
            _end(state.read(folder), now=True)
        return answer


def _start(folder: Path, spec: Spec) -> subprocess.Popen[str]:
    """A process of its own session, which whoever started us does not know."""
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


def _revive(known: Mapping[str, Any]) -> None:
    """Has the supervisor start what was drained, or has failed for good, and waits until it has begun to."""
    descriptor = os.pidfd_open(known["pid"])
    try:
        if state.living(known):
            signal.pidfd_send_signal(descriptor, signal.SIGUSR1)
    finally:
        os.close(descriptor)
    folder, deadline = state.folder_of(Spec.from_json(known["spec"]).name), time.monotonic() + READY_WITHIN
    while state.read(folder) == known and time.monotonic() < deadline:
        time.sleep(_LOOK)


def _await(folder: Path, supervisor: subprocess.Popen[str] | None = None) -> Answer:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline:
        if supervisor is not None and supervisor.poll() is not None:
            why = _end_of(folder, "supervisor")
            return {"trouble": f"the supervisor ended at once ({supervisor.returncode}){why}"}
        known = state.read(folder)
        if known is not None:
            if failed := [name for name, one in known["daemons"].items() if _hopeless(one)]:
                return {"trouble": _failed(folder, known, failed)}
            if all(one["state"] in _SETTLED for one in known["daemons"].values()):
                break
        time.sleep(_LOOK)
    known = state.read(folder) or {"daemons": {}}
    bad = [f"{name} is {one['state']}" for name, one in known["daemons"].items() if one["state"] != "serving"]
    if bad or not known["daemons"]:
        return {"trouble": f"not all daemons serve within {READY_WITHIN:g} s: {'; '.join(bad) or 'none was started'}"}
    return {"already": False, "same": True, "daemons": known["daemons"]}


def _hopeless(one: Mapping[str, Any]) -> bool:
    """Whether a daemon that is to start will not come to serve, as far as anybody can tell."""
    return bool(one["state"] == "failed" or one["failures"] >= _ENOUGH_FAILURES)


def _failed(folder: Path, known: Mapping[str, Any], names: Sequence[str]) -> str:
    """Why: the ends of their logs, which go with all else."""
    counts = {name: known["daemons"][name]["failures"] for name in names}
    return "\n".join(
        f"{name} failed {count} time{'s' if count > 1 else ''}{_end_of(folder, name)}" for name, count in counts.items()
    )


def _end_of(folder: Path, name: str) -> str:
    """The last lines of a log."""
    with contextlib.suppress(OSError):
        lines = (folder / state.LOGS / f"{name.replace(' ', '-')}.log").read_text(errors="replace").splitlines()
        if lines:
            return "".join(["; the end of its log:", *(f"\n    {line}" for line in lines[-_LOG_LINES:])])
    return ""


def down(cluster: str, now: bool) -> Answer:
    """Ends what stays on this host; `cut`: what did not finish."""
    folder = state.folder_of(cluster)
    with state.alone():
        known = state.read(folder)
        if known is None or not state.living(known):
            remove_traces(folder)  # of one that was killed with its keeper
            return {"ran": False}
        with state.awaiting_cut(folder) as told:
            killed = _end(known, now)
            told.seek(0)
            cut = told.read().splitlines()
        deadline = time.monotonic() + PATIENCE + ENDED_WITHIN
        while folder.exists() and time.monotonic() < deadline:  # the keeper of one that had to be killed
            time.sleep(_LOOK)
        remove_traces(folder)
        return {"ran": True, "killed": killed, "cut": cut}


def _end(known: Mapping[str, Any] | None, now: bool) -> bool:
    """Ends a supervisor; whether it had to be killed."""
    if known is None or not state.living(known):
        return False
    descriptor = os.pidfd_open(known["pid"])
    try:
        if not state.living(known):  # it ended in between, and somebody else has its number
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGINT if now else signal.SIGTERM)
        patience = 2 * ENDED_WITHIN + PATIENCE + (0.0 if now else DRAINED_WITHIN)
        if select.select([descriptor], [], [], patience)[0]:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], PATIENCE)
        return True
    finally:
        os.close(descriptor)


def tell(cluster: str) -> Answer:
    """What runs."""
    found = [(folder, known) for folder, known in state.running() if cluster in ("", folder.name)]
    if len(found) != 1:
        names = ", ".join(folder.name for folder, _ in state.running())
        return {"running": False, "clusters": names}
    folder, known = found[0]
    return {"running": True, "name": folder.name, "daemons": known["daemons"], "spec": known["spec"]}


def secret(cluster: str) -> Answer:
    folder = state.folder_of(cluster)
    known = state.read(folder)
    return {"secret": (folder / state.SECRET).read_text().strip() if known and state.living(known) else ""}


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
                answer = secret(cluster)
            case _:
                answer = tell(cluster)
    except (OSError, ValueError) as error:
        answer = {"trouble": str(error)}
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
