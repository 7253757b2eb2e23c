"""What a worker has of NCCL: only where it has GPUs, and what it was told to use or nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fakes.cuda import FakeCuda
from tests.fakes.nccl import FakeNccl

from collectived_proto.errors import FailedPreconditionError
from collectived_runtime.device.gpus import Gpu, select_gpus
from collectived_runtime.device.nccl.interface import Nccl
from collectived_runtime.worker.devices import format_version, load_nccl


def missing(name: str) -> Nccl:
    raise FailedPreconditionError(f"no binding of NCCL can be loaded: {name or 'any'}")


@pytest.fixture
def gpus() -> Iterator[tuple[Gpu, ...]]:
    found = select_gpus(FakeCuda(1), None, pytest.fail)
    yield found
    for gpu in found:
        gpu.close()


def test_without_a_gpu_nothing_is_loaded() -> None:
    assert load_nccl("pynccl", (), pytest.fail, missing).context is None


def test_with_one_it_is_loaded_and_people_are_told_what_it_is(gpus: tuple[Gpu, ...]) -> None:
    asked: list[str] = []

    def get(name: str) -> Nccl:
        asked.append(name)
        return FakeNccl()

    found = load_nccl("auto", gpus, pytest.fail, get)
    assert found.context is not None and found.version == 22809 and found.description == "fake, NCCL 2.28.9"
    assert asked == [""]
    found.close()


def test_where_it_is_missing_the_worker_goes_on_and_says_why(
    gpus: tuple[Gpu, ...], caplog: pytest.LogCaptureFixture
) -> None:
    found = load_nccl("auto", gpus, pytest.fail, missing)
    assert found.context is None and found.version == 0
    assert found.description == "no binding of NCCL can be loaded: any"
    assert "NCCL is not used: no binding of NCCL can be loaded" in caplog.text


def test_where_what_was_asked_for_by_name_is_missing_the_worker_does_not_start(gpus: tuple[Gpu, ...]) -> None:
    with pytest.raises(FailedPreconditionError, match="pynccl"):
        load_nccl("pynccl", gpus, pytest.fail, missing)


@pytest.mark.parametrize(("version", "text"), [(22809, "2.28.9"), (23203, "2.32.3"), (21805, "2.18.5")])
def test_a_version_is_spelled_as_people_do(version: int, text: str) -> None:
    assert format_version(version) == text
