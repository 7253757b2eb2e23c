"""Python, libraries, environment and certificates of the caller, and the jobs that run here."""

from __future__ import annotations

from collections.abc import Iterator

from collectived_launcher.doctor.facts import Certificate, Environment, Library, RunningJob, Software
from collectived_launcher.doctor.finding import Finding, failure, ok, warning
from collectived_launcher.doctor.rules.network import check_clock_skew
from collectived_launcher.doctor.versions import release_distance, satisfies
from collectived_proto.config.units import parse_seconds

BINDINGS = ("nccl4py", "cupy", "pynccl")
_FRESH_ENVIRONMENT = "make a fresh environment (python3 -m venv), and install collectived into that"
SLOW_ANSWER = 0.1  # seconds
EXPIRES_SOON_DAYS = 30  # days
_RENEW = (
    "`collectived certs renew` where it was made, then put the new tls.crt in its place: daemons read it by themselves"
)


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
        yield ok("environment", f"set: {names}" if names else "no variable of collectived is set")


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
    try:
        parse_seconds(timeout or "0")
    except ValueError as error:
        yield failure("environment", f"COLLECTIVED_TIMEOUT: {error}", "export COLLECTIVED_TIMEOUT=60, or unset it")
    binding = environment.variables.get("COLLECTIVED_NCCL")
    if binding and binding not in (*BINDINGS, "auto"):
        yield failure(
            "environment",
            f"COLLECTIVED_NCCL={binding!r} is no binding of NCCL",
            f"export COLLECTIVED_NCCL={'|'.join(BINDINGS)}, or unset it",
        )


def _check_rank(environment: Environment) -> Iterator[Finding]:
    rank, size = (environment.variables.get(name) for name in ("RANK", "WORLD_SIZE"))
    if rank is None and size is None:
        return
    if rank is None or size is None:
        there, missing = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        yield warning(
            "environment",
            f"{there} is set and {missing} is not: join() cannot find its place",
            f"set both, or unset {there}; `collectived launch` sets both",
        )
    elif not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
        yield failure(
            "environment",
            f"RANK={rank} is no rank of WORLD_SIZE={size}: ranks are 0 to WORLD_SIZE - 1",
            "correct or unset both; `collectived launch` sets them",
        )


def check_running_jobs(jobs: tuple[RunningJob, ...], software: Software) -> Iterator[Finding]:
    if not jobs:
        yield ok("running job", "you have none running on this host")
    for job in jobs:
        if job.trouble:
            yield warning(
                "running job",
                f"{job.name} does not answer: {' '.join(job.trouble.split())}",
                "look at its output; if you do not need it any more, end its launcher, or unset COLLECTIVED_WORKER",
            )
            continue
        yield from _check_releases(job, software)
        if job.missing:
            yield warning(
                "running job",
                f"{job.name} answers in part: {'; '.join(job.missing)}",
                "look at the output of the daemon that does not answer; `collectived status` shows what is known",
            )
        elif job.round_trip <= SLOW_ANSWER:
            yield from check_clock_skew(f"{job.name}'s", job.ahead, job.round_trip)
        else:  # a time that was kept back somewhere says nothing of clocks
            slow = f"{job.name} took {job.round_trip * 1e3:.1f} ms to answer, which is too long to compare its clock"
            yield ok("clock skew", f"not measured: {slow}")


def _check_releases(job: RunningJob, software: Software) -> Iterator[Finding]:
    others = {who: release for who, release in job.releases.items() if release_distance(release, software.release)}
    if not others and job.missing:
        return
    if not others:
        yield ok("running job", f"{job.name} answers; all of it runs collectived {software.release}")
        return
    far = max(release_distance(release, software.release) for release in others.values())
    listed = ", ".join(f"{who} {release}" for who, release in sorted(others.items()))
    yield (failure if far > 1 else warning)(
        "running job",
        f"{job.name} runs other releases than this one ({software.release}): {listed}",
        "start the job again, or use the environment that it was started from: `which collectived`",
    )


def check_certificates(found: tuple[Certificate, ...]) -> Iterator[Finding]:
    if not found:
        yield ok("certificates", "none is named by the environment or the daemons' file: TCP is plain text here")
    for one in found:
        who = f"{one.path} (named by {one.named_by})"
        if one.trouble:
            yield failure("certificates", one.trouble, f"it is named by {one.named_by}: correct that, or the file")
        elif one.days_left is None:
            yield ok("certificates", f"{who} can be used")
        elif one.days_left < EXPIRES_SOON_DAYS:
            yield warning("certificates", f"{who} expires in {_days_text(one.days_left)}", _RENEW)
        else:
            yield ok("certificates", f"{who} is good for {_days_text(one.days_left)}")


def _days_text(count: int) -> str:
    return "less than a day" if count < 1 else "1 day" if count == 1 else f"{count} days"
