"""The place that a launcher gave this process: which rank it is, of how many, in which job.

Pure: an environment goes in. Read are torchrun's variables, which `collectived launch` sets too; those of Open MPI,
MPICH (hydra, as Intel MPI) and MVAPICH; those of a Slurm step (`srun`); and `TF_CONFIG`. The first that is there wins:
an MPI launcher inside a Slurm allocation runs its processes under a step of its own, whose numbers are not theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")  # the size is missing in a batch script, which is no rank
_JOBS = ("COLLECTIVED_JOB", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE")
_TF_RANKS = ("chief", "master", "worker")  # task types that take part in collectives, in the order of their ranks


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """None where nothing says it; `source` names the variables that were read."""

    rank: int | None
    size: int | None
    source: str


NO_LAUNCH_ENV = LaunchEnv(None, None, "")


def read_launch_env(environ: Mapping[str, str]) -> LaunchEnv:
    """Raises ValueError where a variable says what it cannot."""
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return _read_rank_and_size(environ, "RANK", "WORLD_SIZE")
    for rank, size in (*_MPI, _SLURM):
        if environ.get(rank) and environ.get(size):
            return _read_rank_and_size(environ, rank, size)
    return _parse_tf_config(environ["TF_CONFIG"]) if environ.get("TF_CONFIG") else NO_LAUNCH_ENV


def read_job(environ: Mapping[str, str]) -> str:
    """The job by its launcher's name; '' where nothing says it."""
    return next((value for name in _JOBS if (value := environ.get(name))), "")


def _read_rank_and_size(environ: Mapping[str, str], rank: str, size: str) -> LaunchEnv:
    found = LaunchEnv(_read_int(environ, rank), _read_int(environ, size), f"{rank}, {size}")
    if found.size is not None and found.size < 1:
        raise ValueError(f"{size} must be at least 1, it is {found.size}")
    if found.rank is not None and found.rank < 0:
        raise ValueError(f"{rank} must not be negative, it is {found.rank}")
    return found


def _read_int(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, it is {text!r}") from None


def _parse_tf_config(text: str) -> LaunchEnv:
    try:
        said = json.loads(text)
        cluster, task = said["cluster"], said.get("task", {})
        sizes = {kind: len(cluster.get(kind, ())) for kind in _TF_RANKS}
        kind, index = task["type"], int(task["index"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            'TF_CONFIG must be JSON such as {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", '
            f'"index": 0}}}}, it is {text!r} ({type(error).__name__}: {error})'
        ) from None
    if kind not in _TF_RANKS:
        raise ValueError(
            f"TF_CONFIG makes this process {kind!r}, which takes no part in collectives: expected one of "
            f"{', '.join(_TF_RANKS)}"
        )
    if not 0 <= index < sizes[kind]:
        raise ValueError(f"TF_CONFIG makes this process {kind} {index}, but its cluster has {sizes[kind]} of that type")
    before = sum(sizes[other] for other in _TF_RANKS[: _TF_RANKS.index(kind)])
    return LaunchEnv(before + index, sum(sizes.values()), "TF_CONFIG")
