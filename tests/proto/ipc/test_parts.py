"""Messages about parts of values, written and read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectived_proto.ipc import messages
from collectived_proto.ipc.parts import ResultPart, parse_result_part

u32, u63 = st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1)


@given(instance=u63, arena=u32, offset=u63, slot=u63, start=u63, length=st.integers(1, 2**63))
def test_a_part_is_read_as_it_was_written(
    instance: int, arena: int, offset: int, slot: int, start: int, length: int
) -> None:
    part = ResultPart(instance, arena, offset, slot, start, start + length)
    assert messages.parse_type(part.encode()) is messages.MessageType.RESULT_PART
    assert parse_result_part(part.encode()) == part


@pytest.mark.parametrize("data", [ResultPart(1, 2, 3, 4, 5, 5).encode(), ResultPart(1, 2, 3, 4, 5, 6).encode() + b"x"])
def test_what_is_no_part_is_refused(data: bytes) -> None:
    with pytest.raises(messages.MalformedMessage, match="a part of a result"):
        parse_result_part(data)
