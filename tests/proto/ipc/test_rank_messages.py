"""Messages of ranks that match by themselves, on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from collectived_proto.ipc import messages, rank_messages
from collectived_proto.ipc.rank_messages import Delivery, Header, LinkOffer, Unclaimed

LARGE = (1 << 64) - 1
CASES: list[tuple[Any, Callable[[bytes], Any], messages.MessageType]] = [
    (LinkOffer(LARGE, (1 << 32) - 1, True, LARGE), rank_messages.parse_link_offer, messages.MessageType.RANK_LINK),
    (LinkOffer(1, 0, False, 0), rank_messages.parse_link_offer, messages.MessageType.RANK_LINK),
    (Delivery(LARGE, 7, (1 << 32) - 1, 3, LARGE, 9), rank_messages.parse_delivery, messages.MessageType.MESSAGE),
    (Unclaimed(LARGE, 7, (1 << 32) - 1, LARGE, 5), rank_messages.parse_unclaimed, messages.MessageType.UNCLAIMED),
]


@pytest.mark.parametrize(("told", "parse", "kind"), CASES)
def test_messages_come_back_as_they_were(told: Any, parse: Callable[[bytes], Any], kind: messages.MessageType) -> None:
    data = told.encode()
    assert messages.parse_type(data) is kind
    assert parse(data) == told
    for other in (data[:-1], data + b"x"):
        with pytest.raises(messages.MalformedMessage):
            parse(other)


def test_a_rank_says_from_which_generation_on_it_matches() -> None:
    data = rank_messages.encode_matching(LARGE)
    assert rank_messages.parse_matching(data) == LARGE
    with pytest.raises(messages.MalformedMessage):
        rank_messages.parse_matching(data[:-1])


def test_headers_come_back_as_they_were() -> None:
    header = Header((1 << 32) - 1, rank_messages.MAX_DESCRIPTION, LARGE, LARGE)
    data = header.encode()
    assert len(data) == rank_messages.HEADER_BYTES
    assert rank_messages.parse_header(data + b"what follows") == header


@pytest.mark.parametrize(
    "data", [bytes(32), Header(0, rank_messages.MAX_DESCRIPTION + 1, 0, 0).encode(), b"CDM\x02" + bytes(28)]
)
def test_other_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(ValueError, match="no header of a message"):
        rank_messages.parse_header(data)


def test_a_watched_submission_says_so() -> None:
    submit = messages.Submit(1, 2, messages.P2P_BASE, 0.5, False, (), timeout=1.0, watched=True)
    assert messages.parse_submit(submit.encode()) == submit
    assert not messages.parse_submit(submit._replace(watched=False).encode()).watched
