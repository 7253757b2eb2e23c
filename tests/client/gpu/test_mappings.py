"""When memory of a worker on a GPU is unmapped, and what nobody waits for meanwhile."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest
from tests.fakes.client_cuda import FakeClientCuda

from collectived.gpu.mappings import Mapping, Mappings

SIZE = 4096


@pytest.fixture
def cuda() -> FakeClientCuda:
    return FakeClientCuda()


@pytest.fixture
def mappings(cuda: FakeClientCuda) -> Iterator[Mappings]:
    made = Mappings(cuda, 0)
    made.add_session()
    yield made
    cuda.let_go()
    made.remove_session()


def mapped(mappings: Mappings) -> Mapping:
    descriptor = os.memfd_create("of-a-worker")
    os.ftruncate(descriptor, SIZE)
    return mappings.map(descriptor, SIZE)


def test_streams_that_come_and_go_take_one_event_in_turn(cuda: FakeClientCuda, mappings: Mappings) -> None:
    event, _ = cuda.create_event(0)
    for stream in range(100):
        assert mappings.wait_event(event, stream)
    assert len(cuda.events) == 2, "that of the worker and one of ours"


def test_a_stream_that_waits_keeps_memory_mapped_and_its_event(cuda: FakeClientCuda, mappings: Mappings) -> None:
    memory = mapped(mappings)
    cuda.held.add(7)
    event, _ = cuda.create_event(0)
    for stream in (7, 8, 9):
        assert mappings.wait_event(event, stream)
    assert len(cuda.events) == 3, "8 and 9 share theirs"
    del memory
    gc.collect()
    mappings.unmap_unused()
    assert cuda.mapped
    cuda.let_go()
    mappings.unmap_unused()
    assert not cuda.mapped


def test_who_follows_does_not_wait_for_who_unmaps(cuda: FakeClientCuda, mappings: Mappings) -> None:
    memory = mapped(mappings)
    del memory
    gc.collect()
    inside, goes_on, unmap = threading.Event(), threading.Event(), cuda.unmap

    def waits_for_the_device(device: int, address: int, size: int) -> None:
        inside.set()
        assert goes_on.wait(20)
        unmap(device, address, size)

    cuda.unmap = waits_for_the_device  # type: ignore[method-assign]
    sweeping = threading.Thread(target=mappings.unmap_unused)
    sweeping.start()
    assert inside.wait(20)
    event, _ = cuda.create_event(0)
    assert not mappings.wait_event(event, 7), "the result is waited for instead"
    goes_on.set()
    sweeping.join()
    assert mappings.wait_event(event, 7) and not cuda.mapped
