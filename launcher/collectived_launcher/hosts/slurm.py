"""Slurm: the nodes of a job, and `srun` as a carrier.

| where `collectived launch` is called | what it does |
|---|---|
| in an allocation, not under srun (a batch script, a shell of salloc) | starts one agent per node by `srun` |
| under srun, one task per node | each instance is its node's agent; the first one leads |
| under srun, several tasks per node | an error: clients are started by us, not by srun |
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from collectived_launcher.hosts.remote_host import AGENT_MODULE, RemoteCommand

WRONG_USE = 2  # exit status
_SCONTROL_TIMEOUT = 20.0
_FIRST_RESERVED_STEP = 0xFFFFFFF0  # batch scripts, interactive shells and such: steps that srun did not start


@dataclass(frozen=True, slots=True)
class SlurmAllocation:
    """The nodes that a job of Slurm has. `tasks`: how many the user asked for on each, or on all if it is one number;
    empty where nothing is said."""

    job: str
    nodes: str  # as Slurm writes them: n[1-3,7]
    tasks: tuple[int, ...]


def find_allocation(environment: Mapping[str, str]) -> SlurmAllocation | None:
    """The allocation in which we are called to start everything; None outside, and under srun."""
    job, nodes = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NODELIST", "")
    if not job or not nodes or is_under_srun(environment):
        return None
    return SlurmAllocation(job, nodes, _read_task_counts(environment))


def is_under_srun(environment: Mapping[str, str]) -> bool:
    """Whether srun started us as a task of a step."""
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _FIRST_RESERVED_STEP


@dataclass(frozen=True, slots=True)
class SlurmStep:
    """A step of srun's with one task per node, of which we are one. `folder`: where its tasks meet."""

    nodes: str
    task: int
    tasks: int
    folder: Path

    @property
    def is_leader(self) -> bool:
        return self.task == 0


def find_step(environment: Mapping[str, str], program: Sequence[str]) -> SlurmStep | None:
    """The step of srun's in which we are; None if srun did not start us.

    Raises:
        click.UsageError: it has several tasks on a node; the text shows the line that was meant.
        SystemExit: the same, in a task other than the first, which reports it.
    """
    if not is_under_srun(environment):
        return None
    most = max(map(int, re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))))
    if most > 1:
        if environment.get("SLURM_PROCID") != "0":
            raise SystemExit(WRONG_USE)  # one says why
        count = environment.get("SLURM_STEP_NUM_NODES", "1")
        raise click.UsageError(
            f"srun started {most} tasks on a node, and each would be that node's agent; expected one, which starts "
            f"{most} clients:\n    srun --nodes={count} --ntasks-per-node=1 collectived launch --clients {most} -- "
            f"{shlex.join(program)}"
        )
    state = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    name = ".".join(environment.get(word, "0") for word in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    return SlurmStep(
        environment.get("SLURM_STEP_NODELIST", ""),
        int(environment.get("SLURM_PROCID", "0")),
        int(environment.get("SLURM_STEP_NUM_TASKS", "1")),
        Path(state) / "collectived" / f"slurm-{name}",
    )


def _read_task_counts(environment: Mapping[str, str]) -> tuple[int, ...]:
    """As `--ntasks` or `--ntasks-per-node` has them; SLURM_TASKS_PER_NODE alone may count processors."""
    spread = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_TASKS_PER_NODE", ""))
    each = tuple(int(tasks) for tasks, count in spread for _ in range(int(count or 1)))
    if environment.get("SLURM_NTASKS") == str(sum(each)):
        return each
    most = environment.get("SLURM_NTASKS_PER_NODE", "")
    return (int(most),) if most.isdigit() else ()


def expand_nodes(written: str) -> tuple[str, ...]:
    """The names of nodes that Slurm writes as `n[1-3,7]`, in its order.

    Raises:
        click.UsageError: Slurm does not say.
    """
    if not re.search(r"[\[,]", written):
        return (written,)
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", written], capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise click.UsageError(f"Slurm's nodes {written!r} cannot be told apart: scontrol: {error}") from error
    if done.returncode or not done.stdout.split():
        raise click.UsageError(f"Slurm's nodes {written!r} cannot be told apart: {done.stderr.strip()}")
    return tuple(done.stdout.split())


def make_remote_command(node: str, python: str) -> RemoteCommand:
    """How an agent is started on a node of our allocation."""
    if not shutil.which("srun"):
        raise click.UsageError("SLURM_JOB_ID is set, and srun is not to be found in PATH; --workers 1: this host alone")
    step = (
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--cpu-bind=none",  # the agent's clients are to have all the processors that the allocation has there
        f"--nodelist={node}",
        "--overlap",  # the agents of this job alone use the nodes, and share them with other steps of the user's
        "--mem=0",  # all that the allocation has there
        "--unbuffered",
        "--kill-on-bad-exit=0",
        "--input=0",  # standard input is for the agent; it brings the secret
        "--quiet",
    )
    return RemoteCommand("srun", ("srun", *step, python, "-P", "-m", AGENT_MODULE), node)
