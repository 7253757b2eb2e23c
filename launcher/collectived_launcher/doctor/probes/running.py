"""What runs here already, and what the environment says."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import click

from collectived_launcher.doctor.facts import Environment, RunningJob
from collectived_proto.ipc import job_files

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Anything else of ours may be a secret, also one that does not exist yet: of it, only that it is set.
_PUBLIC_VARIABLES = frozenset(
    f"COLLECTIVED_{name}"
    for name in ("CONFIG", "COORDINATOR", "GROUP", "JOB", "LABEL", "NCCL", "RESTART", "TIMEOUT", "TRANSPORT", "WORKER")
).union(_TORCHRUN_VARIABLES)
_UNIX = "unix:"


def probe_environment(variables: Mapping[str, str]) -> Environment:
    ours = {
        name: value
        for name, value in variables.items()
        if name.startswith("COLLECTIVED_") or name in _TORCHRUN_VARIABLES
    }
    worker = ours.get("COLLECTIVED_WORKER", "")
    there = os.path.exists(worker.removeprefix(_UNIX)) if worker.startswith(_UNIX) else None
    return Environment({name: value if name in _PUBLIC_VARIABLES else "(set)" for name, value in ours.items()}, there)


def probe_running_jobs(folder: str, variables: Mapping[str, str]) -> tuple[RunningJob, ...]:
    """Asks each job of this user, and the worker that COLLECTIVED_WORKER names.

    Args:
        folder: where jobs leave their files; it may not exist.
    """
    from collectived_launcher.status.discovery import Target  # gRPC: nobody else here needs it

    targets = {}
    if named := variables.get("COLLECTIVED_WORKER"):
        targets["COLLECTIVED_WORKER"] = Target((named,), "COLLECTIVED_WORKER")
    if os.path.isdir(folder):
        targets |= {job.job: Target(job.workers, f"job {job.job}") for job in job_files.list_running_jobs()}
    return tuple(_query_job(name, target) for name, target in targets.items())


def _query_job(name: str, target: object) -> RunningJob:
    from collectived_launcher.status.discovery import Target, request_status

    assert isinstance(target, Target)
    asked = time.time()
    try:
        reply = request_status(target)
    except click.ClickException as error:
        return RunningJob(name, trouble=error.message)
    answered = time.time()
    releases = {f"worker {worker.task}": worker.release for worker in reply.workers}
    if reply.coordinator.address:
        releases["coordinator"] = reply.coordinator.release
    for worker in reply.workers:
        releases |= {f"a client of worker {worker.task} ({release})": release for release in worker.client_releases}
    known = {who: release for who, release in releases.items() if release}
    missing = list(reply.warnings)
    if reply.answered_by not in ("", "coordinator") and not missing:
        missing.append(f"the coordinator does not answer: this is what {reply.answered_by} knows")
    return RunningJob(name, known, reply.unix_time - (asked + answered) / 2, answered - asked, tuple(missing))
