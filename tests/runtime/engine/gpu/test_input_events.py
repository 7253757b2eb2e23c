"""Values that a client's GPU is still writing: who waits for them, and who need not."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fakes.client_cuda import FakeClientCuda
from tests.fakes.cuda import FakeCuda

from collectived_runtime.device.gpus import Gpu, select_gpus
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.gpu.input_events import InputEvents

RANK: Any = cast(LocalRank, SimpleNamespace(rank=0))


class Scene:
    """A GPU of a worker, and a client's event that is over unless `hold` is called."""

    def __init__(self, hold: Path) -> None:
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.gpu: Gpu = select_gpus(FakeCuda(hold=hold), None, print)[0]
        self.client = FakeClientCuda()
        self.event, handle = self.client.create_event(0)
        self.events = InputEvents(self.calls.put, lambda rank, why: None)
        self.events.register(0, 5, handle)
        self.written: list[int] = []

    def record(self) -> None:
        self.client.record_event(0, self.event, 1)

    def wait(self, instance: int) -> None:
        self.events.start_wait(RANK, instance, self.gpu, 5, lambda: self.written.append(instance))

    def go_on(self) -> None:
        """Does the next thing that the group loop is asked to."""
        self.calls.get(timeout=20)()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "hold")
    yield made
    made.client.let_go()
    made.events.close()
    made.gpu.close()


def opened(scene: Scene) -> Scene:
    scene.record()
    scene.wait(0)
    while not scene.written:
        scene.go_on()
    return scene


def test_an_event_that_is_over_is_waited_for_by_nobody(scene: Scene) -> None:
    opened(scene).record()
    scene.wait(1)
    assert scene.written == [0, 1] and scene.calls.empty()


def test_an_event_that_is_not_over_is_waited_for_and_later_ones_behind_it(scene: Scene) -> None:
    opened(scene).client.held.add(1)
    memory = scene.client.malloc(8)
    scene.client.copy(0, memory, memory, 8, 1)
    scene.record()
    scene.wait(1)
    scene.wait(2)
    assert scene.written == [0]
    scene.client.let_go()
    while len(scene.written) < 3:
        scene.go_on()
    assert scene.written == [0, 1, 2]
