"""Probes of installed software, the environment, and jobs that run here already."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

import click

from collectived_launcher.doctor.facts import Certificate, Environment, Library, RunningJob, Software
from collectived_launcher.doctor.versions import parse_requirement
from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.resolve import resolve_values
from collectived_proto.config.sources import find_config_file, load_config_file
from collectived_proto.ipc import job_files
from collectived_proto.report.phrases import short_worker_names
from collectived_proto.tls import files
from collectived_proto.tls.files import TlsFiles

PACKAGE = "collectived"
_DAEMON_IMPORTS = "grpc, grpc_health, grpc_status, google.protobuf, ml_dtypes, numpy, collectived_native"
_IMPORT_PROGRAM = f"import {_DAEMON_IMPORTS}, prometheus_client, collectived_proto.v1.worker_pb2_grpc"
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Any other variable of collectived may be a secret, also one that does not exist yet: only that it is set is reported.
_PUBLIC_VARIABLES = frozenset(
    f"COLLECTIVED_{name}"
    for name in ("CONFIG", "COORDINATOR", "GROUP", "JOB", "LABEL", "NCCL", "RESTART", "TIMEOUT", "TRANSPORT", "WORKER")
).union(_TORCHRUN_VARIABLES)
_UNIX = "unix:"


def probe_software(loads_within: float) -> Software:
    """Have a Python load what a daemon loads, in `loads_within` seconds, and list what is installed."""
    cannot_load, slow = _try_imports(loads_within)
    about = metadata.metadata(PACKAGE)
    wanted = [found for text in metadata.requires(PACKAGE) or () if (found := parse_requirement(text))]
    return Software(
        release=metadata.version(PACKAGE),
        python=platform.python_version(),
        wanted_python=str(about["Requires-Python"] or ""),
        libraries=tuple(Library(name, _installed_version(name), versions) for name, versions in wanted),
        extras=tuple(about.get_all("Provides-Extra") or ()),
        cannot_load=cannot_load,
        slow_to_load=slow,
    )


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _try_imports(within: float) -> tuple[str, float]:
    """A process of its own, started as daemons are: what cannot be loaded may take its process along."""
    line = [sys.executable, "-P", "-c", _IMPORT_PROGRAM]
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within)
    except subprocess.TimeoutExpired:
        return "", within
    if not done.returncode:
        return "", 0.0
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1], 0.0


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
    """Ask each job with files in `folder`, which may not exist, and the worker that COLLECTIVED_WORKER names."""
    from collectived_launcher.status.discovery import Target  # gRPC: no other probe needs it

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
        missing.append(f"the coordinator does not answer: this is what {short_worker_names(reply.answered_by)} knows")
    return RunningJob(name, known, reply.unix_time - (asked + answered) / 2, answered - asked, tuple(missing))


def probe_certificates(variables: Mapping[str, str]) -> tuple[Certificate, ...]:
    """Those of the environment, and those of the file that daemons started here read.

    Raises:
        ConfigError: the file cannot be used.
    """
    named = {"the environment": (TlsFiles.from_environment(variables), False), **dict(_daemon_tls_files(variables))}
    return tuple(_inspect_certificate(who, which, serves) for who, (which, serves) in named.items() if which)


def _daemon_tls_files(variables: Mapping[str, str]) -> Iterator[tuple[str, tuple[TlsFiles, bool]]]:
    path = find_config_file(None, variables)
    if path is None:
        return
    for name, settings in DAEMONS.items():
        values = resolve_values(settings, {}, {}, load_config_file(path)).values
        yield f"{path} for the {name}", (TlsFiles(values["tls_cert"], values["tls_key"], values["tls_ca"]), True)


def _inspect_certificate(named_by: str, which: TlsFiles, serves: bool) -> Certificate:
    path = str(which.cert or which.ca or which.key)
    try:
        identity = files.load_material(which, serves).identity
    except files.TlsFileError as error:
        return Certificate(named_by, path, trouble=str(error))
    return Certificate(named_by, path, (identity.not_after - datetime.now(UTC)).days if identity else None)
