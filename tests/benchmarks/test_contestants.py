"""How the ranks of each library are started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import contestants as who
from benchmarks.environments import ENVIRONMENTS

FOLDER = Path("environment")


def ports(count: int) -> int:
    return 20_000


@pytest.mark.parametrize("contestant", who.ALL, ids=lambda contestant: contestant.name)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_command_runs_the_rank_of_its_library(contestant: who.Contestant, ranks: int) -> None:
    launches = contestant.launches(FOLDER, ranks, ports)
    assert len(launches) in (1, ranks)
    for launch in launches:
        assert launch.command[-3:] == ("-m", "benchmarks.rank", contestant.library)
        assert Path(launch.command[0]).is_relative_to(FOLDER)


def test_one_host_is_one_worker_and_tcp_is_a_worker_per_rank() -> None:
    (host,), (tcp,) = who.HOST.launches(FOLDER, 4, ports), who.TCP.launches(FOLDER, 4, ports)
    assert host.command[2:6] == ("--workers", "1", "--clients", "4")
    assert tcp.command[2:6] == ("--workers", "4", "--clients", "1")


def test_workers_of_tensorflow_agree_on_the_cluster() -> None:
    configs = [json.loads(launch.environment["TF_CONFIG"]) for launch in who.TENSORFLOW.launches(FOLDER, 4, ports)]
    assert len({json.dumps(config["cluster"]) for config in configs}) == 1
    assert [config["task"]["index"] for config in configs] == [0, 1, 2, 3]


def test_every_peer_has_an_environment_of_its_own() -> None:
    assert set(ENVIRONMENTS) < set(who.KEYS)
    folders = {environment.folder for environment in ENVIRONMENTS.values()}
    assert len(folders) == len(ENVIRONMENTS)
