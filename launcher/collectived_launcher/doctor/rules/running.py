"""Jobs that run here already: do they answer, and is what they run the release that we are?"""

from __future__ import annotations

from collections.abc import Iterator

from collectived_launcher.doctor.facts import RunningJob, Software
from collectived_launcher.doctor.finding import Finding, failure, ok, warning
from collectived_launcher.doctor.rules.network import check_clock_skew
from collectived_launcher.doctor.versions import release_distance

SLOW_ANSWER = 0.1  # seconds


def check_running_jobs(jobs: tuple[RunningJob, ...], software: Software) -> Iterator[Finding]:
    if not jobs:
        yield ok("running job", "none of yours runs on this host")
    for job in jobs:
        if job.trouble:
            yield warning(
                "running job",
                f"{job.name} does not answer: {' '.join(job.trouble.split())}",
                "look at its output; if it is not yours any more, end its launcher, or unset COLLECTIVED_WORKER",
            )
            continue
        yield from _check_releases(job, software)
        if job.missing:
            yield warning(
                "running job",
                f"{job.name} answers in part: {'; '.join(job.missing)}",
                "look at the output of whoever is silent; `collectived status` tells what is known",
            )
        elif job.round_trip <= SLOW_ANSWER:  # a time that was kept back somewhere says nothing of clocks
            yield from check_clock_skew(f"{job.name}'s", job.ahead, job.round_trip)


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
