"""The benchmark of GPUs, with fake ones: daemons, ranks and NCCL in processes of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpus
from benchmarks.gpu_figures import NCCL, ONE_GPU, OURS, RAW, TORCH
from benchmarks.gpu_teams import Field, ours_by_nccl, ours_on_one_worker, raw_nccl, torch_nccl
from benchmarks.page import between
from benchmarks.peers import OWNED
from benchmarks.schedule import Pace
from tests.benchmarks.fake_gpu_rank import FAILS
from tests.e2e.gpu.cluster import FakeWorker
from tests.fakes.client_cuda import FakeClientCuda
from tests.forked_daemon import ForkedDaemon

from collectived.gpu import driver
from collectived.gpu.driver import CudaError
from collectived.testing.daemon import Daemon


def start_daemon(words: Sequence[str], secret: str, within: Sequence[str]) -> Daemon:
    if words[0] == "coordinator":
        return ForkedDaemon(words, secret)
    return FakeWorker(words, secret, environment={"COLLECTIVED_FAKE_GPUS": "1"})


def field(**variables: str) -> Field:
    return Field("tests.benchmarks.fake_gpu_rank", start_daemon, variables)


def plan(*sizes: int, seconds: float = 100.0) -> tuple[gpus.Plan, list[str]]:
    said: list[str] = []
    return gpus.Plan(sizes, Pace(2, 0.001, 2, 3), time.monotonic() + seconds, said.append), said


def test_ranks_of_one_worker_are_measured_at_every_size() -> None:
    found = gpus.Found()
    made, said = plan(4, 1 << 16)
    gpus.measure_one_gpu(found, made, 2, [ours_on_one_worker(field(), 2, (OWNED,))])
    assert found.failures == []
    assert [(one.place, one.ranks, one.name, one.variant, one.bytes) for one in found.figures] == [
        (ONE_GPU, 2, OURS, OWNED, 4),
        (ONE_GPU, 2, OURS, OWNED, 1 << 16),
    ]
    assert all(one.seconds > 0 and one.calls in (4, 6) for one in found.figures)
    assert "collectived" in found.versions and len(said) >= 3


def test_ranks_of_two_workers_are_measured_beside_raw_nccl() -> None:
    found = gpus.Found()
    gpus.measure_nccl(found, plan(4, 1 << 16)[0], [ours_by_nccl(field()), raw_nccl(field())])
    assert found.failures == []
    assert [(one.place, one.name, one.bytes) for one in found.figures] == [
        (NCCL, OURS, 4),
        (NCCL, RAW, 4),
        (NCCL, OURS, 1 << 16),
        (NCCL, RAW, 1 << 16),
    ]
    assert found.versions["NCCL by fake"] == "2.28.9"


def test_pytorch_is_measured_beside_them() -> None:
    pytest.importorskip("torch", reason="torch is not installed: make test-torch")
    found = gpus.Found()
    gpus.measure_nccl(found, plan(4, 1 << 16)[0], [torch_nccl(field(GLOO_SOCKET_IFNAME="lo"))])
    assert found.failures == []
    assert [(one.name, one.bytes) for one in found.figures] == [(TORCH, 4), (TORCH, 1 << 16)]


def test_who_fails_at_a_size_is_named_and_measured_at_the_next_one_and_nobody_else_is_kept_from_it() -> None:
    found = gpus.Found()
    gpus.measure_nccl(found, plan(4, 64, 128)[0], [ours_by_nccl(field(**{FAILS: "64"})), raw_nccl(field())])
    assert found.failures == [
        "NCCL, 2 ranks, collectived, session.empty at 64 B: rank 1: MemoryError: no memory for it"
    ]
    assert [(one.name, one.bytes) for one in found.figures] == [(OURS, 4), (RAW, 4), (RAW, 64), (OURS, 128), (RAW, 128)]


def test_who_cannot_be_started_is_named() -> None:
    def broken(words: Sequence[str], secret: str, within: Sequence[str]) -> Daemon:
        raise OSError("no such program")

    found = gpus.Found()
    gpus.measure_nccl(found, plan(4)[0], [ours_by_nccl(Field(start_daemon=broken)), raw_nccl(field())])
    assert found.failures == ["collectived: OSError: no such program"]
    assert [one.name for one in found.figures] == [RAW]


def test_a_worker_that_falls_back_is_told() -> None:
    found = gpus.Found()
    ours = ours_by_nccl(field(COLLECTIVED_BENCH_DEVICE="CPU:0"))
    gpus.measure_nccl(found, plan(4)[0], [ours])
    assert found.failures == ["collectived: NCCL did not carry it, as its workers say"]


def test_nothing_begins_when_the_time_is_over() -> None:
    found = gpus.Found()
    gpus.measure_nccl(found, plan(4, 64, seconds=-1)[0], [raw_nccl(field())])
    assert found.figures == [] and found.failures == ["NCCL, 4 B and all that follows there: the time is over"]


def test_without_a_gpu_it_says_so_and_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def none() -> Any:
        raise CudaError("cuInit", 100, "CUDA_ERROR_NO_DEVICE")

    monkeypatch.setattr(driver, "get_cuda", none)
    monkeypatch.setattr("sys.argv", ["gpus", "--out", str(tmp_path / "all.json")])
    assert gpus.main() == 1
    assert "no GPU can be measured: cuInit failed: CUDA_ERROR_NO_DEVICE" in capsys.readouterr().err
    assert not (tmp_path / "all.json").exists()


def test_a_gpu_that_is_there_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "get_cuda", lambda: FakeClientCuda(()))
    assert gpus.find_obstacle() == "the driver offers none"
    monkeypatch.setattr(driver, "get_cuda", FakeClientCuda)
    assert gpus.find_obstacle() == ""


def test_the_page_has_a_place_for_it() -> None:
    page = Path(__file__).parents[2] / "docs" / "internals" / "performance.md"
    assert "figures" in between(page.read_text(), "gpus", "figures")
