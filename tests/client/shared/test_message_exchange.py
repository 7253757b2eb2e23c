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
from collectived_proto.types import ANY_SOURCE, Broadcast, Collective, DType, Leaf, Recv

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


def send_again(exchange: MessageExchange, array: Any, source: int = 3, tag: int = 0) -> bytearray:
    """Take a message like this one, and return the next one as it comes over a link."""
    value = np.asarray(array, np.float32)
    message = make_message(value, tag)
    exchange.remember(Recv(source, tag), "key", message.head, value)
    return bytearray(message.head + value.tobytes())


def test_a_message_like_the_last_one_goes_straight_to_who_waits(exchange: MessageExchange) -> None:
    memory = bytearray(b"before") + send_again(exchange, [1, 2, 3]) + b"behind"
    length = len(memory) - 12
    assert exchange.expect(Recv(3, 0), "another key", None) is None
    expected = exchange.expect(Recv(3, 0), "key", None)
    assert expected is not None
    assert exchange.take_expected(4, memory, 6, len(memory)) == 0
    assert exchange.take_expected(3, memory, 5, len(memory)) == 0
    assert exchange.take_expected(3, memory, 6, 6 + length - 1) == length and not expected.is_there
    assert exchange.take_expected(3, memory, 6, 6 + length) == length and expected.is_there
    assert expected.array.tolist() == [1, 2, 3]
    assert exchange.take_expected(3, memory, 6, 6 + length) == 0


def test_an_array_that_is_given_takes_what_is_expected(exchange: MessageExchange) -> None:
    memory, out = send_again(exchange, [[1, 2], [3, 4]]), np.empty((2, 2), np.float32)
    expected = exchange.expect(Recv(3, 0), "key", out)
    assert expected is not None and expected.array is out
    assert exchange.take_expected(3, memory, 0, len(memory)) == len(memory)
    assert out.tolist() == [[1, 2], [3, 4]]


def test_nothing_overtakes_an_earlier_message_or_receive(exchange: MessageExchange) -> None:
    memory = send_again(exchange, [1, 2, 3])
    waiting = exchange.expect(Recv(3, 0), "key", None)
    assert waiting is not None and exchange.expect(Recv(3, 0), "key", None) is None  # by a second thread
    exchange.pair(3, make_message([1], tag=1))
    exchange.pair(4, make_message([1]))
    assert exchange.take_expected(3, memory, 0, len(memory) - 1)
    exchange.pair(3, make_message([1]))
    assert not exchange.take_expected(3, memory, 0, len(memory))
    for source in (3, 4):
        exchange.take(Recv(source, 0))
    posted: Any = object()
    exchange.matcher.post(posted, 0, ANY_SOURCE, 0)
    assert exchange.expect(Recv(3, 0), "key", None) is None
    exchange.matcher.withdraw(posted)
    assert exchange.expect(Recv(3, 0), "key", None) is not None
    exchange.forget_expected()
    assert not exchange.take_expected(3, memory, 0, len(memory))


def test_heads_are_not_remembered_without_end(exchange: MessageExchange) -> None:
    for number in range(5000):
        exchange.remember(Recv(number, 0), number, b"head", np.ones(1))
    assert len(exchange._heads) <= 1024
    exchange.remember(Recv(ANY_SOURCE, 0), "any", b"head", np.ones(1))  # whose next one may come from another rank
    assert exchange.expect(Recv(ANY_SOURCE, 0), "any", None) is None
