"""Doorbell messages: what is sent is what is read, and what nobody should send is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectived_proto.deadline import Deadline
from collectived_proto.local import wire
from collectived_proto.protocol import FIRST, Versions

u32 = st.integers(0, 2**32 - 1)
u63 = st.integers(0, 2**63 - 1)


@given(
    generation=u63,
    prepared=u63,
    instance=u63,
    remaining=st.floats(0, 1e9),
    more=st.floats(0, 1e9),
    staged=st.booleans(),
    addresses=st.lists(st.tuples(u32, u63), max_size=20),
    released=st.lists(u63, max_size=20),
    output=st.none() | st.tuples(u32, u63),
    event=st.integers(0, 64),
    ordered=st.booleans(),
)
def test_a_ring_is_read_as_it_was_written(
    remaining: float, more: float, addresses: Any, released: Any, **fields: Any
) -> None:
    timeout = remaining + more
    ring = wire.Ring(
        **fields, remaining=remaining, addresses=tuple(addresses), released=tuple(released), timeout=timeout
    )
    expected = ring if timeout else ring._replace(timeout=0.0)
    assert wire.kind_of(ring.encode()) is wire.Kind.RING
    assert wire.parse_ring(ring.encode()) == expected


@given(number=st.integers(1, 64), handle=st.binary(min_size=64, max_size=64))
def test_an_event_is_read_as_it_was_written(number: int, handle: bytes) -> None:
    assert wire.kind_of(wire.event(number, handle)) is wire.Kind.EVENT
    assert wire.parse_event(wire.event(number, handle)) == (number, handle)


@pytest.mark.parametrize("number", [0, 65])
def test_events_are_numbered_as_calls_in_flight_are(number: int) -> None:
    with pytest.raises(wire.Malformed, match=f"an event of number {number}"):
        wire.parse_event(wire.event(number, bytes(64)))


@given(gpu=u32, identity=u63, handle=st.binary(min_size=64, max_size=64))
def test_memory_that_is_lent_is_read_as_it_was_written(**fields: Any) -> None:
    lent = wire.Lent(**fields)
    assert wire.kind_of(lent.encode()) is wire.Kind.DEVICE_OPEN
    assert wire.parse_lent(lent.encode()) == lent


@pytest.mark.parametrize("lending", [wire.Lending(2**63, 3, 2**40), wire.Lending(7, why="it has ended")])
def test_what_has_become_of_it_is_read_as_it_was_written(lending: wire.Lending) -> None:
    assert wire.parse_lending(lending.encode()) == lending


def test_memory_is_never_opened_as_arena_0() -> None:
    opened = wire.Lending(7, 3, 4096).encode()
    with pytest.raises(wire.Malformed, match="arena 0"):
        wire.parse_lending(opened.replace(b"\x03", b"\x00"))


@given(
    instance=u63,
    pack=st.integers(0, 2**16 - 1),
    last=st.booleans(),
    result=st.booleans(),
    arena=u32,
    offset=u63,
    slot=u63,
)
def test_a_completion_is_read_as_it_was_written(**fields: Any) -> None:
    done = wire.Done(**fields)
    assert wire.parse_done(done.encode()) == done


@given(instance=u63, event=st.integers(wire.WORKER_EVENT, 2**64 - 1), handle=st.binary(min_size=64, max_size=64))
def test_a_launch_is_read_as_it_was_written(**fields: Any) -> None:
    launched = wire.Launched(**fields)
    assert wire.kind_of(launched.encode()) is wire.Kind.LAUNCHED
    assert wire.parse_launched(launched.encode()) == launched


def test_events_of_the_worker_are_numbered_apart_from_result_slots() -> None:
    with pytest.raises(wire.Malformed, match="a launch with event 5"):
        wire.parse_launched(wire.Launched(1, 5, bytes(64)).encode())


@given(st.binary(max_size=200))
def test_random_bytes_are_read_or_refused_and_nothing_else(data: bytes) -> None:
    for parse in (
        wire.parse_ring,
        wire.parse_release,
        wire.parse_done,
        wire.parse_launched,
        wire.parse_failed,
        wire.parse_freed,
        wire.parse_arena,
        wire.parse_event,
        wire.parse_lent,
        wire.parse_lending,
        wire.parse_refused,
        wire.parse_hello,
        wire.kind_of,
    ):
        try:
            parse(data)
        except wire.Malformed:
            continue


RING = wire.Ring(1, 2, 3, 0.5, False, ((1, 2), (3, 4)), (5,), 1.0).encode()


@pytest.mark.parametrize("cut", range(1, len(RING)))
def test_a_truncated_ring_is_refused(cut: int) -> None:
    with pytest.raises(wire.Malformed):
        wire.parse_ring(RING[:cut])


def test_a_ring_with_bytes_behind_it_is_refused() -> None:
    with pytest.raises(wire.Malformed):
        wire.parse_ring(RING + b"x")


@pytest.mark.parametrize("remaining", [-1.0, math.nan, -math.inf])
def test_a_ring_with_an_impossible_deadline_is_refused(remaining: float) -> None:
    with pytest.raises(wire.Malformed):
        wire.parse_ring(wire.Ring(1, 2, 3, remaining, True, ((1, 2),), timeout=5.0).encode())


def test_a_timeout_of_next_to_nothing_is_no_shorter_than_what_is_left_of_it() -> None:
    remaining = Deadline.after(1e-9).wire()
    ring = wire.parse_ring(wire.Ring(1, 2, 3, remaining, True, ((1, 2),), timeout=1e-9).encode())
    assert ring.remaining == ring.timeout == remaining


def test_a_hello_of_the_first_protocol_says_no_versions_and_one_of_a_later_may_say_more() -> None:
    assert wire.parse_hello(b"CDL1" + b"t" * 16) == (b"t" * 16, FIRST)
    assert wire.parse_hello(wire.hello(b"t" * 16, Versions(2, 9)) + b"more") == (b"t" * 16, Versions(2, 9))


@pytest.mark.parametrize("data", [b"", b"CDL1", b"CDL1" + b"t" * 15, b"CDL1" + b"t" * 17, b"CDL2" + b"t" * 20])
def test_what_is_no_hello_is_refused(data: bytes) -> None:
    with pytest.raises(wire.Malformed):
        wire.parse_hello(data)


def test_other_messages_survive_the_trip() -> None:
    assert wire.parse_hello(wire.hello(b"t" * 16, Versions(2, 4))) == (b"t" * 16, Versions(2, 4))
    assert wire.parse_release(wire.release((1, 2**63))) == (1, 2**63)
    for in_use in (False, True):
        failed = wire.failed(-1, b"verdict", in_use)
        assert wire.parse_failed(failed) == (-1, b"verdict") and wire.in_use(failed) == in_use
        assert wire.in_use(wire.bare(wire.Kind.PONG, "so it is" if in_use else "")) == in_use
    assert wire.parse_freed(wire.freed(1 << 63, 5)) == (1 << 63, 5)
    assert wire.parse_arena(wire.arena(wire.Kind.ARENA_ASK, 7, 2**40)) == (7, 2**40)
    assert wire.parse_refused(wire.refused(8, "too much ✓")) == (8, "too much ✓")
    assert wire.text_of(wire.bare(wire.Kind.ABORT, "loss is NaN")) == "loss is NaN"
