"""The place of a process, from the variables of launchers."""

from __future__ import annotations

import json

import pytest

from collectived.connection import environment
from collectived.connection.launch_env import NO_LAUNCH_ENV, LaunchEnv, read_job, read_launch_env

TF_CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
OURS = ("RANK", "WORLD_SIZE", "COLLECTIVED_GROUP", "COLLECTIVED_JOB", "TF_CONFIG", "SLURM_PROCID", "PMI_RANK")


def tf_config(kind: str, index: int) -> str:
    return json.dumps({"cluster": TF_CLUSTER, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4"}, LaunchEnv(3, 4, "RANK, WORLD_SIZE")),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            LaunchEnv(1, 2, "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE"),
        ),
        (
            {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"},
            LaunchEnv(1, 2, "MV2_COMM_WORLD_RANK, MV2_COMM_WORLD_SIZE"),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, LaunchEnv(0, 2, "PMI_RANK, PMI_SIZE")),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, LaunchEnv(5, 8, "SLURM_PROCID, SLURM_STEP_NUM_TASKS")),
        ({"TF_CONFIG": tf_config("chief", 0)}, LaunchEnv(0, 3, "TF_CONFIG")),
        ({"TF_CONFIG": tf_config("worker", 1)}, LaunchEnv(2, 3, "TF_CONFIG")),
        ({}, NO_LAUNCH_ENV),
    ],
)
def test_each_launcher_is_understood(environ: dict[str, str], expected: LaunchEnv) -> None:
    assert read_launch_env(environ) == expected


def test_a_batch_script_of_slurm_is_no_rank() -> None:
    assert read_launch_env({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == NO_LAUNCH_ENV


def test_torchruns_variables_win_over_all_others() -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert read_launch_env({**slurm, "TF_CONFIG": tf_config("worker", 0), "RANK": "3", "WORLD_SIZE": "4"}).rank == 3


def test_an_mpi_launcher_wins_over_the_slurm_step_that_carries_it() -> None:
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert read_launch_env({**step, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}).size == 4


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a whole number, it is 'x'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK must not be negative, it is -1"),
        ({"PMI_RANK": "0", "PMI_SIZE": "0"}, "PMI_SIZE must be at least 1, it is 0"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG must be JSON such as"),
        ({"TF_CONFIG": "[]"}, "TF_CONFIG must be JSON such as"),
        ({"TF_CONFIG": json.dumps({"cluster": TF_CLUSTER})}, "TF_CONFIG must be JSON such as"),
        ({"TF_CONFIG": tf_config("ps", 0)}, "'ps', which takes no part in collectives"),
        ({"TF_CONFIG": tf_config("worker", 2)}, "worker 2, but its cluster has 2 of that type"),
    ],
)
def test_a_variable_that_says_what_it_cannot_is_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError) as error:
        read_launch_env(environ)
    assert words in str(error.value)


def test_the_job_is_named_by_its_launcher() -> None:
    assert read_job({"SLURM_JOB_ID": "7", "COLLECTIVED_JOB": "mine"}) == "mine"
    assert read_job({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "run"}) == "7"
    assert read_job({"PMIX_NAMESPACE": "prterun-1@1"}) == "prterun-1@1"
    assert read_job({}) == ""


def test_who_has_a_place_joins_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="COLLECTIVED_GROUP"):
        environment.group_name()
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert (environment.group_name(), environment.group_size(), environment.rank(2)) == ("world", 2, 1)
    assert environment.rank(3) is None
