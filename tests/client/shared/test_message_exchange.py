"""What a rank keeps of messages that no receive has asked for, and which may be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectived.shared.message_call import SHORT_BYTES, KeptMessage, make_short_value, measure_kept
from collectived.shared.message_exchange import MessageExchange
from collectived.shared.message_forms import describe_value
from collectived.values import nest
from collectived_proto.ipc.rank_messages import Header
from collectived_proto.types import Broadcast, Collective, DType, Leaf, Recv

ROOM = 1 << 20


class Links:
    """Takes note of the links that go on."""

    def __init__(self) -> None:
        self.resumed: list[int] = []

    def resume(self, peer: int) -> None:
        self.resumed.append(peer)


@pytest.fixture
def links() -> Links:
    return Links()


@pytest.fixture
def exchange(links: Any) -> MessageExchange:
    made = MessageExchange(1, 0, links)
    made.most_kept = ROOM
    return made


def describe(*shapes: tuple[int, ...]) -> bytes:
    leaves = tuple(Leaf(f"[{index}]", DType.FLOAT32, shape) for index, shape in enumerate(shapes))
    return describe_value(Collective(Broadcast(0), nest.LEAF if len(shapes) == 1 else "[*,*]", leaves))


def make_message(array: Any, tag: int = 0, description: bytes = b"") -> KeptMessage:
    value = np.asarray(array, np.float32)
    memory = np.frombuffer(bytearray(value.tobytes()), np.uint8)
    return KeptMessage(tag, description or describe(value.shape), memory)


def test_messages_without_bytes_take_room_too(exchange: MessageExchange) -> None:
    header = Header(0, 1000, 0, 0)
    count = 0
    while exchange.try_keep(measure_kept(header)):
        count += 1
    assert ROOM // 2000 < count < ROOM // 1000


def test_a_message_that_is_taken_gives_its_room_back(exchange: MessageExchange) -> None:
    message = make_message(np.ones(100))
    header = Header(0, len(message.description), message.nbytes, 0)
    assert exchange.try_keep(measure_kept(header))
    assert exchange.pair(3, message) is None
    assert exchange.kept_bytes == message.cost == measure_kept(header)
    assert exchange.find(Recv(3, 0)) is message
    exchange.take(Recv(3, 0))
    assert exchange.kept_bytes == 0
    assert exchange.find(Recv(3, 0)) is None


def test_a_link_waits_for_messages_that_went_by_the_worker(exchange: MessageExchange, links: Links) -> None:
    header = Header(0, 10, 10, 2)
    assert not exchange.may_read(3, header)
    exchange.count_delivered(3)
    exchange.count_delivered(4)
    assert not exchange.may_read(3, header)
    exchange.count_delivered(3)
    assert exchange.may_read(3, header)
    assert links.resumed == [3, 4, 3]


def test_a_long_message_waits_for_the_call_that_is_about_to_take_it(exchange: MessageExchange, links: Links) -> None:
    long, short = Header(0, 10, SHORT_BYTES + 1, 0), Header(0, 10, SHORT_BYTES, 0)
    assert exchange.may_read(3, long)
    exchange.short_receives = 1
    assert exchange.may_read(3, short) and not exchange.wants_call
    assert not exchange.may_read(3, long) and exchange.wants_call
    exchange.resume_held()
    assert links.resumed == [3]


@pytest.mark.parametrize("shape", [(4,), (2, 3), (1, 1, 1)])
def test_one_array_is_taken_without_a_call(shape: tuple[int, ...]) -> None:
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = make_short_value(make_message(value), None)
    assert found.dtype == np.float32 and np.array_equal(found, value)
    out = np.empty(shape, np.float32)
    assert make_short_value(make_message(value), out) is out
    assert np.array_equal(out, value)


READ_ONLY = np.empty(4, np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("message", "out"),
    [
        (make_message(np.ones(4)), np.empty(5, np.float32)),
        (make_message(np.ones(4)), np.empty(4, np.float64)),
        (make_message(np.ones(4)), np.empty((8,), np.float32)[::2]),
        (make_message(np.ones(4)), READ_ONLY),
        (make_message(np.ones(4)), [0.0] * 4),
        (make_message(np.float32(1)), None),
        (make_message(np.ones(0)), None),
        (make_message(np.ones(4), description=describe((2,), (2,))), None),
        (make_message(np.ones(4), description=describe((5,))), None),
        (make_message(np.ones(4), description=b"\xff\xff"), None),
        (make_message(np.ones(SHORT_BYTES)), None),
        (make_message(np.ones(4), description=describe((4,)) + bytes(5000)), None),
    ],
)
def test_other_messages_need_a_call(message: KeptMessage, out: Any) -> None:
    before = None if out is None else np.array(out)
    assert make_short_value(message, out) is None
    if before is not None:
        assert np.array_equal(np.asarray(out), before, equal_nan=True)
