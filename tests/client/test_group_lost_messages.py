"""What a worker says after a message that this process could not take in does not change how the generation ended."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived_proto.ipc import arena, messages


@pytest.fixture
def descriptors() -> Iterator[Any]:
    """Takes all descriptors away that this process does not have yet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_result_in_memory_whose_descriptor_was_lost_is_no_nonsense_of_the_worker(make: Any, descriptors: Any) -> None:
    setting = make(size=2)
    setting.group.all_reduce("sum", np.ones(4))  # for which memory has come
    further = arena.create(1001, 1 << 16, readers_only=True)

    def answer(ring: messages.Submit) -> list[bytes]:
        descriptors()
        told = messages.encode_arena(messages.MessageType.ARENA, 1001, 1 << 16)
        socket.send_fds(setting.far.doorbell, [told], [further.descriptor])
        return [messages.Completion(ring.instance, 0, True, True, 1001, 0, 9).encode()]

    setting.far.answer, setting.far.pong = answer, False
    with pytest.raises(cd.errors.ResourceExhaustedError, match="RLIMIT_NOFILE is 3") as first:
        setting.group.all_reduce("sum", np.ones(4))
    with pytest.raises(cd.errors.ResourceExhaustedError) as again:
        setting.group.barrier()
    assert again.value.verdict == first.value.verdict
    further.close()
