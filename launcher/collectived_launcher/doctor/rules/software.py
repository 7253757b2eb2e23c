"""Python, libraries, and the environment of the caller."""

from __future__ import annotations

import math
from collections.abc import Iterator

from collectived_launcher.doctor.facts import Environment, Library, Software
from collectived_launcher.doctor.finding import Finding, failure, ok, warning
from collectived_launcher.doctor.versions import satisfies

BINDINGS = ("nccl4py", "cupy", "pynccl")
_FRESH_ENVIRONMENT = "make a fresh environment (python3 -m venv), and install collectived into that"


def check_python(software: Software) -> Iterator[Finding]:
    wanted = software.wanted_python
    if satisfies(software.python, wanted):
        yield ok("python", f"{software.python} ({wanted} is needed), collectived {software.release}")
    else:
        remedy = f"make an environment with a Python {wanted}, and install collectived {software.release} into it"
        yield failure("python", f"{software.python}, and {wanted} is needed", remedy)


def check_libraries(software: Software) -> Iterator[Finding]:
    bad = [library for library in software.libraries if not _is_satisfied(library)]
    for library in bad:
        has = f"{library.installed} is installed" if library.installed else "it is not installed"
        yield failure(
            "libraries",
            f"{library.name}: {has}, and {library.wanted or 'any version'} is needed",
            f'pip install --upgrade "{library.name}{library.wanted}"',
        )
    if software.cannot_load:
        remedy = f"install anew what is named there; where that does not help: {_FRESH_ENVIRONMENT}"
        yield failure("libraries", f"a daemon cannot load them: {software.cannot_load}", remedy)
    if software.slow_to_load:
        remedy = "have the environment on a disk of this host; `collectived launch` waits 30 s for a daemon"
        yield warning("libraries", f"a daemon has not loaded them within {software.slow_to_load:g} s", remedy)
    if not bad and not software.cannot_load and not software.slow_to_load:
        yield ok("libraries", ", ".join(f"{library.name} {library.installed}" for library in software.libraries))


def _is_satisfied(library: Library) -> bool:
    return library.installed is not None and satisfies(library.installed, library.wanted)


def check_environment(environment: Environment) -> Iterator[Finding]:
    findings = [*_check_worker(environment), *_check_values(environment), *_check_rank(environment)]
    yield from findings
    if not findings:
        names = ", ".join(sorted(environment.variables))
        yield ok("environment", f"set: {names}" if names else "no variable of ours is set")


def _check_worker(environment: Environment) -> Iterator[Finding]:
    if environment.worker_is_there is False:
        yield failure(
            "environment",
            f"COLLECTIVED_WORKER={environment.variables['COLLECTIVED_WORKER']} names a socket that is not there: "
            "its worker has ended",
            "unset COLLECTIVED_WORKER, or start the worker again",
        )


def _check_values(environment: Environment) -> Iterator[Finding]:
    timeout = environment.variables.get("COLLECTIVED_TIMEOUT")
    if timeout and not _is_seconds(timeout):
        yield failure(
            "environment",
            f"COLLECTIVED_TIMEOUT={timeout!r} is not a number of seconds",
            "export COLLECTIVED_TIMEOUT=60, or unset it",
        )
    binding = environment.variables.get("COLLECTIVED_NCCL")
    if binding and binding not in (*BINDINGS, "auto"):
        yield failure(
            "environment",
            f"COLLECTIVED_NCCL={binding!r} is no binding of NCCL",
            f"export COLLECTIVED_NCCL={'|'.join(BINDINGS)}, or unset it",
        )


def _is_seconds(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


def _check_rank(environment: Environment) -> Iterator[Finding]:
    rank, size = (environment.variables.get(name) for name in ("RANK", "WORLD_SIZE"))
    if rank is None and size is None:
        return
    if rank is None or size is None:
        there, missing = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        yield warning(
            "environment",
            f"{there} is set and {missing} is not: join() cannot tell its place",
            f"set both, or unset {there}; `collectived launch` sets both",
        )
    elif not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
        yield failure(
            "environment",
            f"RANK={rank} is no rank of WORLD_SIZE={size}: ranks are 0 to WORLD_SIZE - 1",
            "correct or unset both; `collectived launch` sets them",
        )
