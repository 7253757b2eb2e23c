"""Slurm: which nodes are ours, and `srun` as a carrier.

| where `collectived launch` is called | what it does |
|---|---|
| in an allocation, not under srun (a batch script, a shell of salloc) | starts one agent per node by `srun` |
| under srun, one task per node | each instance is its node's agent; the first one leads |
| under srun, several tasks per node | an error: clients are started by us, not by srun |
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

import click

from collectived_launcher.launch.elsewhere import AGENT, Carrier

_ASK_SECONDS = 20.0
_FIRST_RESERVED_STEP = 0xFFFFFFF0  # batch scripts, interactive shells and such: steps that srun did not start


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes that a job of Slurm has. `tasks_per_node`: as the user asked for them; 0 where nothing is said."""

    job: str
    nodes: str  # as Slurm writes them: n[1-3,7]
    tasks_per_node: int


def allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation in which we are called to start everything; None outside, and under srun."""
    job, nodes = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NODELIST", "")
    if not job or not nodes or under_srun(environment):
        return None
    return Allocation(job, nodes, _tasks(environment.get("SLURM_NTASKS_PER_NODE", "")))


def under_srun(environment: Mapping[str, str]) -> bool:
    """Whether srun started us as a task of a step."""
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _FIRST_RESERVED_STEP


def _tasks(text: str) -> int:
    return int(text) if text.isdigit() else 0


def nodes(found: Allocation) -> tuple[str, ...]:
    """Their names, in Slurm's order.

    Raises:
        click.UsageError: Slurm does not say.
    """
    if not re.search(r"[\[,]", found.nodes):
        return (found.nodes,)
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", found.nodes], capture_output=True, text=True, timeout=_ASK_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise click.UsageError(f"Slurm's nodes {found.nodes!r} cannot be told apart: scontrol: {error}") from error
    if done.returncode or not done.stdout.split():
        raise click.UsageError(f"Slurm's nodes {found.nodes!r} cannot be told apart: {done.stderr.strip()}")
    return tuple(done.stdout.split())


def carrier(node: str, python: str) -> Carrier:
    """How an agent is started on a node of our allocation."""
    if not shutil.which("srun"):
        raise click.UsageError("SLURM_JOB_ID is set, and srun is not to be found in PATH; --workers 1: this host alone")
    step = (
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        "--overlap",  # our agents are the only ones who use the nodes, and share them with other steps of the user's
        "--mem=0",  # all that the allocation has there
        "--unbuffered",
        "--kill-on-bad-exit=0",
        "--input=0",  # standard input is for the agent; it brings the secret
        "--quiet",
    )
    return Carrier("srun", ("srun", *step, python, "-P", "-m", AGENT), node)
