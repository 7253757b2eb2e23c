"""Gathers facts: every look runs in a thread of its own and has a limit, so that none can hang doctor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from collectived_launcher.doctor.checks import CHECKS, Check, judge
from collectived_launcher.doctor.facts import Facts, Unknown
from collectived_launcher.doctor.finding import Finding, Grade
from collectived_launcher.doctor.probes import certificates, gpus, network, running, software, system
from collectived_proto.deadline import Deadline

WITHIN = 20.0  # seconds for all looks together
_AT_START_WITHIN = 5.0  # seconds that `launch` keeps its user waiting for them
_LOAD_WITHIN = 15.0  # seconds for libraries: cold disks of a cluster are slow
_ASK_WITHIN = 10.0  # seconds for the driver of GPUs

STILL_AFTER = 5.0  # seconds after which who waits hears for what

Look = Callable[[], Any]
Still = Callable[[list[str]], None]


def gather(
    environment: Mapping[str, str],
    checks: Iterable[Check] = CHECKS,
    within: float = WITHIN,
    still: Still | None = None,
) -> Facts:
    """Looks at what these checks need, in so many seconds at most; the rest is Unknown. `still`: as `together`."""
    wanted = {part for check in checks for part in check.parts}
    looks = {part: look for part, look in _looks(environment).items() if part in wanted}
    if "gpus" in wanted or "nccl" in wanted:
        looks |= _looks_at_gpus(environment)
    parts = together(looks, within, still)
    return Facts(**{part: parts.get(part, Unknown("nobody asked")) for part in Facts.__slots__})


def _looks(environment: Mapping[str, str]) -> dict[str, Look]:
    return {
        "software": lambda: software.software(_LOAD_WITHIN),
        "kernel": system.kernel,
        "limits": system.limits,
        "memory": system.memory,
        "folder": system.folder,
        "environment": lambda: running.environment(environment),
        "certificates": lambda: certificates.certificates(environment),
        "network": lambda: network.network(environment),
        "ports": network.ports,
        "clock": system.clock,
        "jobs": lambda: running.running_jobs(system.folder().path, environment),
    }


def _looks_at_gpus(environment: Mapping[str, str]) -> dict[str, Look]:
    """Both need the answer of one process."""
    said: dict[str, Any] = {}
    once = threading.Lock()

    def answer() -> dict[str, Any]:
        with once:
            if not said:
                said.update(gpus.ask_libraries(_ASK_WITHIN))
        return said

    return {"gpus": lambda: gpus.gpus(answer(), environment), "nccl": lambda: gpus.nccl(answer(), environment)}


def together(looks: Mapping[str, Look], within: float, still: Still | None = None) -> dict[str, Any]:
    """Looks at all at once; a look that fails, or does not come back in time, is Unknown.

    One that hangs keeps its thread, which does not keep the process.

    Args:
        still: hears once, after a few seconds, who has not come back.
    """
    found: dict[str, Any] = {name: Unknown(f"nothing came back within {within:g} s") for name in looks}

    def run(name: str, look: Look) -> None:
        try:
            found[name] = look()
        except Exception as error:  # whatever is broken here, the other checks go on
            found[name] = Unknown(f"{type(error).__name__}: {error}")

    threads = {entry[0]: threading.Thread(target=run, args=entry, daemon=True) for entry in looks.items()}
    for thread in threads.values():
        thread.start()
    deadline, soon = Deadline.after(within), Deadline.after(min(within, STILL_AFTER))
    for thread in threads.values():
        thread.join(soon.remaining())
    if still and (late := [name for name, thread in threads.items() if thread.is_alive()]):
        still(late)
    for thread in threads.values():
        thread.join(deadline.remaining())
    return dict(found)


def failures_at_start() -> list[Finding]:
    """What on this host can keep a daemon from coming up; takes a second, and never long."""
    checks = [check for check in CHECKS if check.at_start]
    facts = gather(os.environ, checks, _AT_START_WITHIN)
    return [finding for finding in judge(facts, checks) if finding.grade is Grade.FAILURE]
