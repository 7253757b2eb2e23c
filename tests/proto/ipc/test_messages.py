"""Doorbell messages: what is sent is what is read, and what nobody should send is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectived_proto.deadline import Deadline
from collectived_proto.ipc import messages
from collectived_proto.version import FIRST_VERSIONS, VersionRange

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
    keeps_own=st.booleans(),
    takes_parts=st.booleans(),
)
def test_a_ring_is_read_as_it_was_written(
    remaining: float, more: float, addresses: Any, released: Any, **fields: Any
) -> None:
    timeout = remaining + more
    ring = messages.Submit(
        **fields, remaining=remaining, addresses=tuple(addresses), released_slots=tuple(released), timeout=timeout
    )
    expected = ring if timeout else ring._replace(timeout=0.0)
    assert messages.parse_type(ring.encode()) is messages.MessageType.SUBMIT
    assert messages.parse_submit(ring.encode()) == expected


@given(number=st.integers(1, 64), handle=st.binary(min_size=64, max_size=64))
def test_an_event_is_read_as_it_was_written(number: int, handle: bytes) -> None:
    assert messages.parse_type(messages.encode_event(number, handle)) is messages.MessageType.EVENT
    assert messages.parse_event(messages.encode_event(number, handle)) == (number, handle)


@pytest.mark.parametrize("number", [0, 65])
def test_events_are_numbered_as_calls_in_flight_are(number: int) -> None:
    with pytest.raises(messages.MalformedMessage, match=f"an event of number {number}"):
        messages.parse_event(messages.encode_event(number, bytes(64)))


@given(gpu=u32, buffer_id=u63, handle=st.binary(min_size=64, max_size=64))
def test_memory_that_is_lent_is_read_as_it_was_written(**fields: Any) -> None:
    lent = messages.IpcOpen(**fields)
    assert messages.parse_type(lent.encode()) is messages.MessageType.DEVICE_OPEN
    assert messages.parse_ipc_open(lent.encode()) == lent


@pytest.mark.parametrize(
    "lending", [messages.IpcOpenResult(2**63, 3, 2**40), messages.IpcOpenResult(7, reason="it has ended")]
)
def test_what_has_become_of_it_is_read_as_it_was_written(lending: messages.IpcOpenResult) -> None:
    assert messages.parse_ipc_open_result(lending.encode()) == lending


def test_memory_is_never_opened_as_arena_0() -> None:
    opened = messages.IpcOpenResult(7, 3, 4096).encode()
    with pytest.raises(messages.MalformedMessage, match="number 0"):
        messages.parse_ipc_open_result(opened.replace(b"\x03", b"\x00"))


@given(
    instance=u63,
    pack=st.integers(0, 2**16 - 1),
    is_last=st.booleans(),
    has_result=st.booleans(),
    arena=u32,
    offset=u63,
    slot=u63,
)
def test_a_completion_is_read_as_it_was_written(**fields: Any) -> None:
    done = messages.Completion(**fields)
    assert messages.parse_done(done.encode()) == done


@given(
    instance=u63, event=st.integers(messages.WORKER_EVENT_BASE, 2**64 - 1), handle=st.binary(min_size=64, max_size=64)
)
def test_a_launch_is_read_as_it_was_written(**fields: Any) -> None:
    launched = messages.Launched(**fields)
    assert messages.parse_type(launched.encode()) is messages.MessageType.LAUNCHED
    assert messages.parse_launched(launched.encode()) == launched


def test_events_of_the_worker_are_numbered_apart_from_result_slots() -> None:
    with pytest.raises(messages.MalformedMessage, match="a launch with event 5"):
        messages.parse_launched(messages.Launched(1, 5, bytes(64)).encode())


@given(st.binary(max_size=200))
def test_random_bytes_are_read_or_refused_and_nothing_else(data: bytes) -> None:
    for parse in (
        messages.parse_submit,
        messages.parse_release,
        messages.parse_done,
        messages.parse_launched,
        messages.parse_failed,
        messages.parse_freed,
        messages.parse_arena,
        messages.parse_event,
        messages.parse_ipc_open,
        messages.parse_ipc_open_result,
        messages.parse_refused,
        messages.parse_hello,
        messages.parse_type,
    ):
        try:
            parse(data)
        except messages.MalformedMessage:
            continue


RING = messages.Submit(1, 2, 3, 0.5, False, ((1, 2), (3, 4)), (5,), 1.0).encode()


@pytest.mark.parametrize("cut", range(1, len(RING)))
def test_a_truncated_ring_is_refused(cut: int) -> None:
    with pytest.raises(messages.MalformedMessage):
        messages.parse_submit(RING[:cut])


def test_a_ring_with_bytes_behind_it_is_refused() -> None:
    with pytest.raises(messages.MalformedMessage):
        messages.parse_submit(RING + b"x")


@pytest.mark.parametrize("remaining", [-1.0, math.nan, -math.inf])
def test_a_ring_with_an_impossible_deadline_is_refused(remaining: float) -> None:
    with pytest.raises(messages.MalformedMessage):
        messages.parse_submit(messages.Submit(1, 2, 3, remaining, True, ((1, 2),), timeout=5.0).encode())


def test_a_timeout_of_next_to_nothing_is_no_shorter_than_what_is_left_of_it() -> None:
    remaining = Deadline.after(1e-9).to_wire()
    ring = messages.parse_submit(messages.Submit(1, 2, 3, remaining, True, ((1, 2),), timeout=1e-9).encode())
    assert ring.remaining == ring.timeout == remaining


def test_a_hello_of_the_first_protocol_says_no_versions_and_one_of_a_later_may_say_more() -> None:
    assert messages.parse_hello(b"CDL1" + b"t" * 16) == (b"t" * 16, FIRST_VERSIONS)
    assert messages.parse_hello(messages.encode_hello(b"t" * 16, VersionRange(2, 9)) + b"more") == (
        b"t" * 16,
        VersionRange(2, 9),
    )


@pytest.mark.parametrize("data", [b"", b"CDL1", b"CDL1" + b"t" * 15, b"CDL1" + b"t" * 17, b"CDL2" + b"t" * 20])
def test_what_is_no_hello_is_refused(data: bytes) -> None:
    with pytest.raises(messages.MalformedMessage):
        messages.parse_hello(data)


def test_other_messages_survive_the_trip() -> None:
    assert messages.parse_hello(messages.encode_hello(b"t" * 16, VersionRange(2, 4))) == (b"t" * 16, VersionRange(2, 4))
    assert messages.parse_release(messages.encode_release((1, 2**63))) == (1, 2**63)
    for in_use in (False, True):
        failed = messages.encode_failed(-1, b"verdict", in_use)
        assert messages.parse_failed(failed) == (-1, b"verdict") and messages.is_in_use(failed) == in_use
        assert (
            messages.is_in_use(messages.encode_bare(messages.MessageType.PONG, "so it is" if in_use else "")) == in_use
        )
    assert messages.parse_freed(messages.encode_freed(1 << 63, 5)) == (1 << 63, 5)
    assert messages.parse_arena(messages.encode_arena(messages.MessageType.ARENA_REQUEST, 7, 2**40)) == (7, 2**40)
    assert messages.parse_refused(messages.encode_refused(8, "too much ✓")) == (8, "too much ✓")
    assert messages.parse_text(messages.encode_bare(messages.MessageType.ABORT, "loss is NaN")) == "loss is NaN"
