"""Arenas: sealed as promised, checked before they are mapped."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from collectived_proto.ipc import arena
from collectived_proto.ipc.arena import Arena

SIZE = 1 << 20


@pytest.fixture(params=[False, True], ids=["input", "result"])
def made(request: pytest.FixtureRequest) -> Iterator[Arena]:
    one = arena.create(7, SIZE, readers_only=request.param)
    yield one
    one.close()


def test_nobody_can_change_its_size(made: Arena) -> None:
    for size in (SIZE // 2, SIZE * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(made.descriptor, size)


def test_nobody_can_take_a_seal_away_or_add_one(made: Arena) -> None:
    with pytest.raises(PermissionError):
        fcntl.fcntl(made.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_what_the_worker_writes_the_client_reads(made: Arena) -> None:
    made.commit(4096)
    made.view()[100:105] = b"hello"
    theirs = arena.attach(7, SIZE, os.dup(made.descriptor), writable=False)
    assert bytes(theirs.view()[100:105]) == b"hello"
    theirs.close()


def test_a_result_arena_cannot_be_mapped_writable_by_a_client() -> None:
    made = arena.create(7, SIZE, readers_only=True)
    with pytest.raises(PermissionError):
        arena.attach(7, SIZE, os.dup(made.descriptor), writable=True)
    theirs = arena.attach(7, SIZE, os.dup(made.descriptor), writable=False)
    with pytest.raises(TypeError):
        theirs.view()[0] = 1
    made.commit(SIZE)  # the worker goes on writing and committing
    made.view()[0] = 1
    assert theirs.view()[0] == 1
    theirs.close()
    made.close()


def test_an_input_arena_is_written_by_the_client() -> None:
    made = arena.create(7, SIZE, readers_only=False)
    theirs = arena.attach(7, SIZE, os.dup(made.descriptor), writable=True)
    theirs.view()[SIZE - 1] = 9
    assert made.view()[SIZE - 1] == 9
    theirs.close()
    made.close()


def test_memory_that_is_not_sealed_is_not_mapped() -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    with pytest.raises(ValueError, match="not sealed"):
        arena.attach(7, SIZE, descriptor, writable=False)
    with pytest.raises(OSError):
        os.fstat(descriptor)  # taken over and closed


def test_memory_of_another_size_than_announced_is_not_mapped(made: Arena) -> None:
    with pytest.raises(ValueError, match="announced"):
        arena.attach(7, 2 * SIZE, os.dup(made.descriptor), writable=False)


def test_pages_exist_as_far_as_they_were_committed() -> None:
    made = arena.create(7, 64 << 20, readers_only=True)
    assert os.fstat(made.descriptor).st_blocks == 0
    made.commit(100_000)
    assert made.committed == -(-100_000 // mmap.PAGESIZE) * mmap.PAGESIZE
    assert os.fstat(made.descriptor).st_blocks * 512 == made.committed
    made.commit(1000)
    assert os.fstat(made.descriptor).st_blocks * 512 == made.committed
    made.close()


def test_a_stretch_is_that_part_of_the_arena_until_it_is_closed() -> None:
    made = arena.create(7, SIZE, readers_only=True)
    made.view()[100:105] = b"hello"
    assert bytes(made.slice_bytes(101, 3)) == b"ell" and bytes(made.slice_bytes(104, 1)) == b"o"
    assert len(made.slice_bytes(SIZE - 2, 10)) == 2
    memory = made.memory
    made.close()
    assert memory is not None and memory.closed  # nothing of it was kept
    with pytest.raises(ValueError, match="shared memory 7 is closed"):
        made.slice_bytes(0, 1)


def test_closing_twice_and_while_arrays_look_in_is_harmless() -> None:
    made = arena.create(7, SIZE, readers_only=False)
    view = made.view()
    made.close()
    made.close()
    assert view[0] == 0


def regular(folder: Path) -> int:
    descriptor = os.open(folder / "regular", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, SIZE)
    return descriptor


def pipe(_: Path) -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def partly_sealed(_: Path) -> int:
    descriptor = os.memfd_create("partly", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return descriptor


def shrunk(_: Path) -> int:
    descriptor = os.memfd_create("shrunk", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE // 2)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, arena.SIZE_SEALS)
    return descriptor


@pytest.mark.parametrize("hostile", [regular, pipe, partly_sealed, shrunk])
@pytest.mark.parametrize("writable", [False, True])
def test_what_is_no_arena_is_not_mapped_and_its_descriptor_goes(
    hostile: Callable[[Path], int], writable: bool, tmp_path: Path
) -> None:
    descriptor = hostile(tmp_path)
    with pytest.raises(ValueError, match="shared memory 7"):
        arena.attach(7, SIZE, descriptor, writable=writable)
    with pytest.raises(OSError):
        os.fstat(descriptor)


@pytest.mark.parametrize("size", [0, SIZE + 1, 1 << 62, (1 << 64) - 1])
def test_a_size_that_it_does_not_have_is_refused_before_mapping(made: Arena, size: int) -> None:
    with pytest.raises(ValueError, match="announced"):
        arena.attach(7, size, os.dup(made.descriptor), writable=False)
