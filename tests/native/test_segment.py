"""Geometry, how a process waits, and what is refused when a segment is made or mapped."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from tests.native.ranks import finish, make_geometry, make_plan

from collectived_native import core, segment
from collectived_native.cores import count_cores
from collectived_native.segment import OPERATED, Geometry, Waiting


@pytest.mark.parametrize("seats", [1, 2, 3, 8, 9, 64, 256])
@pytest.mark.parametrize("cores", [1, 2, 64])
def test_every_geometry_that_is_chosen_is_taken_and_travels(seats: int, cores: int) -> None:
    geometry = Geometry.choose(seats, cores=cores, start=17)
    assert Geometry.decode(geometry.encode()) == geometry
    assert core.segment_bytes(geometry.encode()) % 4096 == 0
    assert geometry.share * seats <= 512 << 10 and geometry.share % 64 == 0
    assert seats <= 8 or seats * geometry.small <= 64 << 10


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"seats": 0},
        {"seats": 257},
        {"operated": 2},
        {"start": 1 << 39},
        {"share": 1023},
        {"share": 1024 + 8},
        {"small": 1 << 40},
        {"mail": 1 << 41},
    ],
    ids=str,
)
def test_a_geometry_out_of_range_is_refused(change: dict[str, int]) -> None:
    geometry = replace(make_geometry(2), **change)
    with pytest.raises(ValueError, match="out of range"):
        segment.create(geometry)
    with pytest.raises(ValueError, match="72 bytes"):
        Geometry.decode(geometry.encode()[1:])


def test_a_segment_is_not_taken_for_another() -> None:
    geometry = make_geometry(2)
    descriptor = segment.create(geometry)
    with pytest.raises(ValueError, match="does not fit"):
        segment.attach(descriptor, make_geometry(3), 0)
    with pytest.raises(ValueError):
        segment.attach(descriptor, geometry, 2)
    with pytest.raises(ValueError):
        segment.attach(descriptor, geometry, -1)
    os.close(descriptor)
    with pytest.raises(OSError):
        segment.attach(descriptor, geometry, 0)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, core.segment_bytes(geometry.encode()))
    with pytest.raises(ValueError):  # whoever shrinks it would end those who read it
        segment.attach(unsealed, geometry, 0)
    os.close(unsealed)


def test_a_segment_is_sealed_and_takes_memory_only_as_it_is_used() -> None:
    geometry = Geometry.choose(64, cores=64)
    descriptor = segment.create(geometry)
    assert core.segment_bytes(geometry.encode()) > 1 << 30
    assert os.fstat(descriptor).st_blocks * 512 < 2 << 20
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 4096)
    os.close(descriptor)


def test_a_plan_outlives_its_engine_and_fits_no_other() -> None:
    geometry = make_geometry(1)
    descriptor = segment.create(geometry)
    engine = segment.attach(descriptor, geometry, 0)
    plan = make_plan(engine, core.BARRIER)
    finish(engine, engine.run(plan, (), (), 0, None))
    engine.detach()
    engine.detach()
    again = segment.attach(descriptor, geometry, 0)
    assert again.next_instance() == 1
    with pytest.raises(TypeError, match="plan of this engine"):
        again.run(plan, (), (), 0, None)
    with pytest.raises(RuntimeError, match="detached"):
        engine.run(plan, (), (), 0, None)
    finish(again, again.run(make_plan(again, core.BARRIER), (), (), 0, None))
    again.detach()
    os.close(descriptor)


def test_segments_leave_nothing_mapped_when_they_are_detached() -> None:
    geometry = make_geometry(1)

    def use() -> None:
        descriptor = segment.create(geometry)
        engine = segment.attach(descriptor, geometry, 0)
        finish(engine, engine.submit(make_plan(engine, core.BARRIER), (), (), 0, None, False))
        watcher = segment.watch(descriptor, geometry)
        watcher.close()
        engine.detach()
        os.close(descriptor)

    use()
    before = Path("/proc/self/maps").read_text().count("collectived-segment")
    for _ in range(20):
        use()
    assert Path("/proc/self/maps").read_text().count("collectived-segment") == before


def test_a_rank_looks_only_where_there_are_cores_for_it() -> None:
    cores = count_cores()
    assert Waiting.choose(cores, {}).spin_ns == 60_000
    assert Waiting.choose(cores + 1, {}).spin_ns == 0
    assert Waiting.choose(cores + 1, {}).yields > 0
    assert Waiting.choose(cores + 1, {"COLLECTIVED_SPIN": "7"}).spin_ns == 7000
    assert Waiting.choose(1, {"COLLECTIVED_SPIN": "0"}).spin_ns == 0
    with pytest.raises(ValueError, match="COLLECTIVED_SPIN='much'"):
        Waiting.choose(1, {"COLLECTIVED_SPIN": "much"})


def test_a_rank_s_memory_is_shown_to_others_unless_the_environment_says_no() -> None:
    assert Waiting.choose(2, {}).shows_memory
    assert not Waiting.choose(2, {"COLLECTIVED_DIRECT": "0"}).shows_memory
    assert not OPERATED.shows_memory  # nor does a worker read in another process


def test_a_rank_moves_only_where_nobody_has_bound_it() -> None:
    mask = os.sched_getaffinity(0)
    if len(mask) > 1:
        try:
            os.sched_setaffinity(0, {min(mask)})
            assert not Waiting.choose(1, {}).hops
            assert count_cores() == 1
        finally:
            os.sched_setaffinity(0, mask)
    assert not Waiting.choose(1, {"COLLECTIVED_HOP": "0"}).hops


def test_descriptors_that_run_out_are_an_error_of_the_system() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        with pytest.raises(OSError, match="Too many open files"):
            segment.create(make_geometry(1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
