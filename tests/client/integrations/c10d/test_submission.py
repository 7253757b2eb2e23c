"""Which device a rank of a process group takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

from collectived.integrations.c10d.submission import _own_device  # noqa: E402  # imports torch

GPUS: Any = SimpleNamespace(
    devices=["/job:worker/replica:0/task:0/device:CPU:0", "/job:worker/replica:0/task:0/device:GPU:0"]
)
CPUS: Any = SimpleNamespace(devices=GPUS.devices[:1])


def options(device: str | None) -> Any:
    bound = None if device is None else torch.device(device)
    return SimpleNamespace(process_group=SimpleNamespace(bound_device_id=bound))


def test_a_rank_takes_the_gpu_that_its_process_group_is_bound_to() -> None:
    assert _own_device(GPUS, options("cuda:1")) == torch.device("cuda", 1)
    assert _own_device(CPUS, options("cuda:1")) is None


def test_a_rank_of_no_such_group_takes_the_gpu_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    for told in (options("cpu"), options(None), SimpleNamespace()):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert _own_device(GPUS, told) == torch.device("cuda", 2)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        assert _own_device(GPUS, told) is None
