"""What `--devices` makes a worker offer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.cuda import FakeCuda

from collectived_runtime.device.cuda.driver import Cuda, CudaError
from collectived_runtime.worker.devices import DeviceOffer, discover_devices


def offered(text: str, gpus: int = 3) -> DeviceOffer:
    return discover_devices(text, lambda: FakeCuda(gpus), lambda why: None)


def names(text: str) -> list[str]:
    return [device.short for device in offered(text).device_names(0)]


def no_cuda() -> Cuda:
    raise CudaError("cuInit", 100, "no device")


CPUS = [f"CPU:{index}" for index in range(8)]


def test_auto_offers_all_gpus_beside_the_cpus() -> None:
    assert names("auto") == [*CPUS, "GPU:0", "GPU:1", "GPU:2"]


def test_a_number_of_cpus_offers_no_gpu() -> None:
    assert names("CPU:2") == ["CPU:0", "CPU:1"]


@pytest.mark.parametrize("text", ["GPU:2,0", "gpu:GPU-fake-2,GPU-fake-0"])
def test_gpus_are_numbered_in_the_order_in_which_they_are_named(text: str) -> None:
    assert [device.short for device in offered(text).device_names(0)] == [*CPUS, "GPU:0", "GPU:1"]
    assert [gpu.device.number for gpu in offered(text).gpus] == [2, 0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("GPU:7", "GPU '7' is not here: this process may use 0 (GPU-fake-0), 1 (GPU-fake-1), 2 (GPU-fake-2)"),
        ("GPU:0,GPU-fake-0", "GPU 0 (GPU-fake-0) is wanted twice"),
        ("GPU:GPU-fake", "GPU 'GPU-fake' is the beginning of several"),
        ("CPU:0", "devices must be 'auto', 'CPU:n' with n from 1 to 8"),
        ("CPU:9", "got 'CPU:9'"),
        ("TPU:0", "got 'TPU:0'"),
        ("GPU:", "got 'GPU:'"),
    ],
)
def test_what_cannot_be_offered_is_an_error_that_says_why(text: str, why: str) -> None:
    with pytest.raises(ValueError, match="devices|GPU") as refused:
        offered(text)
    assert why in str(refused.value)


def test_without_cuda_auto_offers_cpus_and_says_what_is_missing_where_there_is_a_driver(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    without = discover_devices("auto", no_cuda, lambda why: None, str(driver))
    assert (without.gpus, without.unavailable_reason) == ((), "")
    driver.touch()
    assert (
        "cuInit failed: no device"
        in discover_devices("auto", no_cuda, lambda why: None, str(driver)).unavailable_reason
    )


def test_without_cuda_gpus_that_are_asked_for_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"devices 'GPU:0' cannot be offered: cuInit failed: no device"):
        discover_devices("GPU:0", no_cuda, lambda why: None)
