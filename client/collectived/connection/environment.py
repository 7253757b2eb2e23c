"""The settings in the environment of this process. Each is read and checked where it is used."""

from __future__ import annotations

import getpass
import os

from collectived.arguments import escape_surrogates
from collectived.connection.launch_env import read_job as launcher_job
from collectived.connection.launch_env import read_launch_env
from collectived_proto.config.units import parse_seconds

WORLD = "world"  # the group of all processes that a launcher started


def group_name() -> str:
    """Name of the group to join: `world` where a launcher gave this process a place and nothing names another.

    Raises ValueError where nothing says it.
    """
    name = os.environ.get("COLLECTIVED_GROUP")
    if not name and read_launch_env(os.environ).size is not None:
        return WORLD
    if not name:
        raise ValueError("join() needs a name: give one, or set COLLECTIVED_GROUP (`collectived launch` does)")
    return name


def group_size() -> int:
    """Number of ranks. Raises ValueError where nothing says it."""
    size = read_launch_env(os.environ).size
    if size is None:
        raise ValueError(
            "join() needs a size: give one, or set WORLD_SIZE (`collectived launch` and torchrun do); the variables "
            "of srun, of MPI launchers and TF_CONFIG are understood too"
        )
    return size


def rank(size: int) -> int | None:
    """This process's rank, where `size` is the size that its launcher counts in."""
    here = read_launch_env(os.environ)
    return here.rank if here.size in (None, size) else None


def timeout() -> float | None:
    """Seconds that a collective may take where neither call nor group says it."""
    text = os.environ.get("COLLECTIVED_TIMEOUT")
    try:
        return parse_seconds(text) if text else None
    except ValueError as error:
        raise ValueError(f"COLLECTIVED_TIMEOUT: {error}") from None


def job() -> str:
    """The job whose group names this process shares."""
    if found := launcher_job(os.environ):
        return escape_surrogates(found)
    try:
        return escape_surrogates(getpass.getuser())
    except (KeyError, OSError):  # a uid without a name
        return f"uid-{os.getuid()}"


def label() -> str:
    """How people know this process; '' where nothing says it."""
    found = _first("COLLECTIVED_LABEL", "POD_NAME")
    step = os.environ.get("SLURM_STEP_ID")
    return escape_surrogates(found or (f"slurm {os.environ.get('SLURM_JOB_ID')}.{step}" if step else ""))


def visible_gpus() -> str | None:
    """Which GPUs this process was given, as CUDA reads it; None where nothing says it."""
    found = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if found is None else escape_surrogates(found)


def _first(*names: str) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")
