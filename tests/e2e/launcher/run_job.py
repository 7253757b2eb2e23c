"""Runs a job on this host: `run_job.py '{"workers": 2, "fault": …}' PROGRAM ARGS…`."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from collectived_launcher.launch.cli import choose_folder
from collectived_launcher.launch.daemons import DAEMON_COMMAND, DaemonCommand
from collectived_launcher.launch.job import make_job_name, make_local_job
from collectived_launcher.launch.job_state import Policy
from collectived_launcher.launch.run import Run


def main() -> int:
    wish = json.loads(sys.argv[1])
    name = make_job_name()
    job = make_local_job(name, wish.get("workers", 2), wish.get("clients", 2), tuple(sys.argv[2:]))
    chosen = ("grace", "max_restarts", "kill_after", "daemon_restarts", "ready_timeout")
    policy = Policy(**{name: wish[name] for name in chosen if name in wish})
    standin = str(Path(__file__).parents[2] / "fakes" / "daemons.py")
    line = DAEMON_COMMAND if wish.get("real") else (sys.executable, standin, wish.get("fault", "none"))
    command = DaemonCommand(line, (), wish.get("ended_within", 5.0))
    log_dir = Path(wish["log_dir"]) if "log_dir" in wish else None
    return Run(job, policy, choose_folder(name, 1), daemons=command, log_dir=log_dir).run()


if __name__ == "__main__":
    status = main()
    gc.freeze()  # as the command does
    sys.exit(status)
