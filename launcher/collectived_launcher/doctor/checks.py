"""Every check there is, in the order in which they are shown, and what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from collectived_launcher.doctor.facts import Facts, Measured, Unknown
from collectived_launcher.doctor.finding import Finding, Grade, warning
from collectived_launcher.doctor.judgements import certificates, gpus, network, running, software, system


@dataclass(frozen=True, slots=True)
class Check:
    """A check of this host.

    parts: of `Facts`, which its judgement is given in this order. at_start: whether it can be why a daemon did not
    come up, and is quick to make.
    """

    name: str
    judge: Callable[..., Iterable[Finding]]
    parts: tuple[str, ...]
    at_start: bool = False


CHECKS = (
    Check("python", software.python, ("software",), at_start=True),
    Check("libraries", software.libraries, ("software",), at_start=True),
    Check("kernel", system.kernel, ("kernel",), at_start=True),
    Check("memfd", system.memfd, ("kernel",), at_start=True),
    Check("pidfd", system.pidfd, ("kernel",), at_start=True),
    Check("sockets", system.sockets, ("kernel",), at_start=True),
    Check("descriptors", system.descriptors, ("limits",), at_start=True),
    Check("locked memory", system.locked_memory, ("limits", "gpus")),
    Check("processes", system.processes, ("limits",), at_start=True),
    Check("memory", system.memory, ("memory",), at_start=True),
    Check("socket folder", system.folder, ("folder",), at_start=True),
    Check("environment", software.environment, ("environment",), at_start=True),
    Check("certificates", certificates.certificates, ("certificates",)),
    Check("gpus", gpus.gpus, ("gpus",)),
    Check("nccl", gpus.nccl, ("nccl", "gpus", "software")),
    Check("interfaces", network.interfaces, ("network",), at_start=True),
    Check("ports", network.ports, ("ports",)),
    Check("clock", system.clock, ("clock",)),
    Check("running job", running.running, ("jobs", "software")),
)
MEASURED = ("reach", "bandwidth", "clock skew", "versions")  # with another host; the third with a running job too


def judge(facts: Facts, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """What to say of a host. Pure."""
    return [finding for check in checks for finding in _judge_one(check, facts)]


def _judge_one(check: Check, facts: Facts) -> Iterable[Finding]:
    parts: list[Any] = [getattr(facts, part) for part in check.parts]
    unknown = [part.why for part in parts if isinstance(part, Unknown)]
    if unknown:
        yield warning(check.name, f"could not be looked at: {unknown[0]}", "look at it by hand, as docs/doctor.md says")
    else:
        yield from check.judge(*parts)


def judge_measured(found: Measured, facts: Facts, host: str) -> Iterator[Finding]:
    """What to say of another host. Pure."""
    if isinstance(facts.software, Unknown):
        yield Finding(
            "versions", Grade.WARNING, f"cannot be compared: {facts.software.why}", "look with pip list", host
        )
        return
    for finding in network.measured(found, facts.software):
        yield replace(finding, host=host)
