"""Every check there is, in the order in which they are shown, and what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from collectived_launcher.doctor.facts import Facts, PathMeasurement, UnknownFact
from collectived_launcher.doctor.finding import Finding, Grade, warning
from collectived_launcher.doctor.rules import gpus, network, software, system


@dataclass(frozen=True, slots=True)
class Check:
    """A check of this host: `rule` judges these `Facts`. `at_start`: quick, and may show why no daemon came up."""

    name: str
    rule: Callable[..., Iterable[Finding]]
    fact_names: tuple[str, ...]
    at_start: bool = False


CHECKS = (
    Check("python", software.check_python, ("software",), at_start=True),
    Check("libraries", software.check_libraries, ("software",), at_start=True),
    Check("kernel", system.check_kernel, ("kernel",), at_start=True),
    Check("memfd", system.check_memfd, ("kernel",), at_start=True),
    Check("pidfd", system.check_pidfd, ("kernel",), at_start=True),
    Check("sockets", system.check_sockets, ("kernel",), at_start=True),
    Check("descriptors", system.check_descriptors, ("limits",), at_start=True),
    Check("locked memory", system.check_locked_memory, ("limits", "gpus")),
    Check("processes", system.check_processes, ("limits",), at_start=True),
    Check("memory", system.check_memory, ("memory",), at_start=True),
    Check("socket folder", system.check_folder, ("folder",), at_start=True),
    Check("environment", software.check_environment, ("environment",), at_start=True),
    Check("certificates", software.check_certificates, ("certificates",)),
    Check("gpus", gpus.check_gpus, ("gpus",)),
    Check("nccl", gpus.check_nccl, ("nccl", "gpus", "software")),
    Check("interfaces", network.check_interfaces, ("network",), at_start=True),
    Check("ports", network.check_ports, ("ports",)),
    Check("clock", system.check_clock, ("clock",)),
    Check("running job", software.check_running_jobs, ("jobs", "software")),
)
# With another host; the third with a running job too.
PAIRWISE_CHECKS = ("reach", "bandwidth", "clock skew", "versions")


def evaluate_checks(facts: Facts, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Find out what to say about a host. Pure."""
    return [finding for check in checks for finding in _evaluate_check(check, facts)]


def _evaluate_check(check: Check, facts: Facts) -> Iterable[Finding]:
    parts: list[Any] = [getattr(facts, part) for part in check.fact_names]
    unknown = [part.why for part in parts if isinstance(part, UnknownFact)]
    if unknown:
        yield warning(
            check.name, f"could not be looked at: {unknown[0]}", "look at it by hand, as docs/operate/doctor.md says"
        )
    else:
        yield from check.rule(*parts)


def evaluate_measurement(found: PathMeasurement, facts: Facts, host: str) -> Iterator[Finding]:
    """Find out what to say about another host. Pure."""
    if isinstance(facts.software, UnknownFact):
        yield Finding(
            "versions", Grade.WARNING, f"cannot be compared: {facts.software.why}", "look with pip list", host
        )
        return
    for finding in network.check_measurement(found, facts.software):
        yield replace(finding, host=host)
