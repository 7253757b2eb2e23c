"""Gathers facts: every look runs in a thread of its own and has a limit, so that none can hang doctor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from collectived_launcher.doctor.checks import CHECKS, Check, evaluate_checks
from collectived_launcher.doctor.facts import Facts, UnknownFact
from collectived_launcher.doctor.finding import Finding, Grade
from collectived_launcher.doctor.probes import gpus, network, software, system
from collectived_proto.deadline import Deadline

TIMEOUT_SECONDS = 20.0  # seconds for all looks together
_STARTUP_TIMEOUT = 5.0  # seconds that `launch` keeps its user waiting for them
_LOAD_TIMEOUT = 15.0  # seconds for libraries: cold disks of a cluster are slow
_GPU_QUERY_TIMEOUT = 10.0  # seconds for the driver of GPUs

SLOW_NOTICE_SECONDS = 5.0  # seconds after which `still` is called with the names of slow probes

Probe = Callable[[], Any]
SlowNotice = Callable[[list[str]], None]


def collect_facts(
    environment: Mapping[str, str],
    checks: Iterable[Check] = CHECKS,
    within: float = TIMEOUT_SECONDS,
    still: SlowNotice | None = None,
) -> Facts:
    """Look at what these checks need, for `within` seconds at most. A probe that is late gives UnknownFact."""
    wanted = {part for check in checks for part in check.fact_names}
    looks = {part: look for part, look in _list_probes(environment).items() if part in wanted}
    if "gpus" in wanted or "nccl" in wanted:
        looks |= _list_gpu_probes(environment)
    parts = run_probes(looks, within, still)
    return Facts(**{part: parts.get(part, UnknownFact("not looked at")) for part in Facts.__slots__})


def _list_probes(environment: Mapping[str, str]) -> dict[str, Probe]:
    return {
        "software": lambda: software.probe_software(_LOAD_TIMEOUT),
        "kernel": system.probe_kernel,
        "limits": system.probe_limits,
        "memory": system.probe_memory,
        "folder": system.probe_folder,
        "environment": lambda: software.probe_environment(environment),
        "certificates": lambda: software.probe_certificates(environment),
        "network": lambda: network.probe_network(environment),
        "ports": network.probe_ports,
        "clock": system.probe_clock,
        "jobs": lambda: software.probe_running_jobs(system.probe_folder().path, environment),
    }


def _list_gpu_probes(environment: Mapping[str, str]) -> dict[str, Probe]:
    said: dict[str, Any] = {}
    once = threading.Lock()

    def answer() -> dict[str, Any]:
        with once:
            if not said:
                said.update(gpus.query_libraries(_GPU_QUERY_TIMEOUT))
        return said

    return {
        "gpus": lambda: gpus.probe_gpus(answer(), environment),
        "nccl": lambda: gpus.probe_nccl(answer(), environment),
    }


def run_probes(looks: Mapping[str, Probe], within: float, still: SlowNotice | None = None) -> dict[str, Any]:
    """Run all probes at once. One that fails, or is late, gives UnknownFact; one that hangs keeps a thread.

    `still` is called once, after `SLOW_NOTICE_SECONDS`, with the names of those that have not come back.
    """
    found: dict[str, Any] = {name: UnknownFact(f"nothing came back within {within:g} s") for name in looks}

    def run(name: str, look: Probe) -> None:
        try:
            found[name] = look()
        except Exception as error:  # after any error here, the other checks go on
            found[name] = UnknownFact(f"{type(error).__name__}: {error}")

    threads = {entry[0]: threading.Thread(target=run, args=entry, daemon=True) for entry in looks.items()}
    for thread in threads.values():
        thread.start()
    deadline, soon = Deadline.after(within), Deadline.after(min(within, SLOW_NOTICE_SECONDS))
    for thread in threads.values():
        thread.join(soon.remaining())
    if still and (late := [name for name, thread in threads.items() if thread.is_alive()]):
        still(late)
    for thread in threads.values():
        thread.join(deadline.remaining())
    return dict(found)


def find_startup_failures() -> list[Finding]:
    """Find what on this host can keep a daemon from coming up. It takes a second, and never long."""
    checks = [check for check in CHECKS if check.at_start]
    facts = collect_facts(os.environ, checks, _STARTUP_TIMEOUT)
    return [finding for finding in evaluate_checks(facts, checks) if finding.grade is Grade.FAILURE]
