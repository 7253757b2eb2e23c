"""Where the value of a submission lies, and its result: every bound is checked before anything is read."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from collectived_proto.ipc import messages
from collectived_proto.types import Broadcast, Collective, DType, Leaf, Member
from collectived_runtime.device.gpus import Region
from collectived_runtime.engine.clients.local_rank import InputBuffers, LocalRank


def test_who_contributes_nothing_may_say_where_its_result_goes_on_a_gpu() -> None:
    collective = Collective(Broadcast(1), "*", (Leaf("", DType.FLOAT32, (4,)),), site="test.py:1")
    prepared: Any = SimpleNamespace(op="broadcast", collective=collective, leaf_bytes=(16,), device_bytes=16)
    gpu: Any = object()
    told = messages.Submit(1, 1, 0, 0.0, False, (), output=(3, 0))

    def look(arena: int, offset: int, size: int) -> Region:
        return Region(gpu, 4096 + offset, size, None)

    found = InputBuffers(look, prepared, told, contributes=False)
    assert found.is_on_device and found.output is not None and found.output.address == 4096


@pytest.fixture
def ends() -> Iterator[tuple[LocalRank, socket.socket]]:
    """A rank, and its end of its doorbell."""
    rank = LocalRank(0, Member(0, "CPU:0", 0, "host", 1), lambda *_: pytest.fail("nothing is read"), -1)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rank.attach_doorbell(theirs)
    yield rank, mine
    rank.close()
    mine.close()


def fill(rank: LocalRank) -> int:
    """Send messages until one waits; how many."""
    count = 1
    while not rank.send(b"x" * 1000):
        count += 1
    return count


@pytest.mark.parametrize("waits", [False, True])
def test_a_descriptor_that_is_lent_may_be_closed_at_once(ends: tuple[LocalRank, socket.socket], waits: bool) -> None:
    rank, mine = ends
    before = fill(rank) if waits else 0
    reader, writer = os.pipe()
    assert rank.lend(b"a pipe", writer) is waits
    os.close(writer)
    for _ in range(before):
        assert len(mine.recv(2000)) == 1000
        rank.flush()
    message, [descriptor], _, _ = socket.recv_fds(mine, 100, 1)
    assert message == b"a pipe" and rank.is_reading
    os.write(descriptor, b"through it")
    os.close(descriptor)
    assert os.read(reader, 100) == b"through it"
    assert os.read(reader, 100) == b"", "no other copy is open"
    os.close(reader)


def test_what_could_not_be_lent_before_its_rank_went_is_closed(ends: tuple[LocalRank, socket.socket]) -> None:
    rank, _ = ends
    fill(rank)
    reader, writer = os.pipe()
    assert rank.lend(b"a pipe", writer)
    os.close(writer)
    rank.close()
    assert os.read(reader, 100) == b""
    os.close(reader)
    assert not rank.lend(b"", -1), "nor is anything lent to a rank that has gone"


def test_it_is_known_whether_a_client_has_read_its_messages(ends: tuple[LocalRank, socket.socket]) -> None:
    rank, mine = ends
    assert not rank.has_unread
    rank.send(b"a message")
    assert rank.is_reading and rank.has_unread
    mine.recv(100)
    assert not rank.has_unread
    before = fill(rank)
    assert not rank.is_reading and rank.has_unread
    for _ in range(before):
        mine.recv(2000)
        rank.flush()
    assert not rank.has_unread
    rank.close()
    assert not rank.has_unread
