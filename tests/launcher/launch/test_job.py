"""Ranks, their environment, and the words a job is introduced with."""

from __future__ import annotations

import pytest

from collectived_launcher.launch.job import Addresses, Job, client_environment, make_job_name, make_local_job

ADDRESSES = Addresses("unix:/r/j/coordinator.sock", ("unix:/r/j/worker-0.sock", "unix:/r/j/worker-1.sock"), 29500)


def job(workers: int = 2, clients: int = 2, timeout: float | None = None) -> Job:
    return make_local_job("j", workers, clients, ("true",), timeout)


SPREAD = Job("j", (2, 1), ("true",), hosts=("a", "b"), variables={"OMP_NUM_THREADS": "1", "RANK": "7"})


@pytest.mark.parametrize(
    ("workers", "clients", "opening"),
    [
        (2, 2, "2 workers × 2 clients = 4 ranks on localhost (worker = daemon of a host, client = your process)"),
        (1, 1, "1 worker × 1 client = 1 rank on localhost (worker = daemon of a host, client = your process)"),
        (3, 1, "3 workers × 1 client = 3 ranks on localhost (worker = daemon of a host, client = your process)"),
    ],
)
def test_the_opening_line(workers: int, clients: int, opening: str) -> None:
    assert job(workers, clients).format_banner() == opening


def test_ranks_are_numbered_worker_by_worker() -> None:
    assert [job(2, 3).find_worker(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert list(job(2, 3).get_ranks(1)) == [3, 4, 5]


def test_a_client_finds_its_place_in_the_environment() -> None:
    assert client_environment(job(), ADDRESSES, rank=3, restart=1) == {
        "COLLECTIVED_WORKER": "unix:/r/j/worker-1.sock",
        "COLLECTIVED_COORDINATOR": "unix:/r/j/coordinator.sock",
        "COLLECTIVED_JOB": "j",
        "COLLECTIVED_GROUP": "world",
        "COLLECTIVED_RESTART": "1",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_workers_may_have_different_numbers_of_clients() -> None:
    assert SPREAD.format_banner().startswith("2 workers with 2 + 1 clients = 3 ranks on a, b (")
    assert [SPREAD.find_worker(rank) for rank in range(3)] == [0, 0, 1]
    assert [list(SPREAD.get_ranks(worker)) for worker in range(2)] == [[0, 1], [2]]


def test_a_client_elsewhere_finds_the_first_host_and_what_the_user_wishes_but_keeps_its_rank() -> None:
    addresses = Addresses("10.0.0.1:7450", ("unix:/a.sock", "unix:/b.sock"), 29500, "10.0.0.1")
    found = client_environment(SPREAD, addresses, rank=2, restart=0)
    wanted = {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    assert found.items() >= {**wanted, "OMP_NUM_THREADS": "1", "COLLECTIVED_WORKER": "unix:/b.sock"}.items()


def test_many_hosts_are_not_all_named() -> None:
    many = Job("j", (1,) * 10, ("true",), hosts=tuple(f"n{number}" for number in range(10)))
    assert "10 ranks on n0, n1, n2, n3, n4, n5, n6, n7 and 2 more (" in many.format_banner()


def test_a_default_timeout_is_told_only_when_it_was_asked_for() -> None:
    assert client_environment(job(timeout=2.5), ADDRESSES, 0, 0)["COLLECTIVED_TIMEOUT"] == "2.5"


def test_names_are_unique_and_short_enough_for_socket_paths() -> None:
    names = {make_job_name() for _ in range(20)}
    assert len(names) == 20
    assert all(len(name) <= 32 and "/" not in name for name in names)
