"""Memory that was handed out by a file: the kernel says whether anybody has that."""

from __future__ import annotations

import os
import socket
from contextlib import closing

from collectived_runtime.device.exported_memory import ExportedMemory


class Memory:
    """What is alive as long as somebody looks into it."""


def test_it_is_held_as_long_as_anybody_has_the_file() -> None:
    handed = os.eventfd(0)
    kept = os.dup(handed)
    with closing(ExportedMemory(handed, 4096, Memory())) as left:
        assert left.is_held_elsewhere() and left.measure() == 4096
        one, other = socket.socketpair()
        socket.send_fds(one, [b"x"], [kept])
        os.close(kept)
        assert left.is_held_elsewhere(), "it is on its way"
        one.close()
        other.close()
        assert not left.is_held_elsewhere()


def test_it_is_held_while_anything_here_looks_into_it() -> None:
    memory = Memory()
    with closing(ExportedMemory(os.eventfd(0), 4096, memory)) as left:
        assert left.is_held_elsewhere()
        del memory
        assert not left.is_held_elsewhere()


def test_of_a_file_that_cannot_be_polled_nobody_is_taken_to_have_it() -> None:
    handed = os.memfd_create("one")
    kept = os.dup(handed)
    with closing(ExportedMemory(handed, 4096, Memory())) as left:
        assert not left.is_held_elsewhere()
    os.close(kept)
