from __future__ import annotations

import pytest

from collectived_native import core
from collectived_proto.ipc import carrier_orders as orders
from collectived_proto.ipc.carrier_orders import Answer, AnswerKind, MoveOrder, RunOrder
from collectived_proto.ipc.messages import MalformedMessage

ANSWER = bytes([4, 0, 0, 0]) + (7).to_bytes(4, "little") + (71).to_bytes(4, "little", signed=True) + bytes(4)


def test_an_order_has_the_bytes_that_the_core_reads() -> None:
    move = MoveOrder(1, orders.RESULT, orders.VALUE, True, 5, 6, 7, 8, b"h" * orders.HEADER_BYTES)
    order = RunOrder(9, 12, 1, 2, 3, 4).encode([move, move])
    assert order[:1] + order[4:8] == bytes([1, 2, 0, 0, 0])
    assert len(order) == 48 + 2 * 96
    first = order[48:144]
    assert first[:4] == bytes([1, 2, 0, 1])
    assert [int.from_bytes(first[at : at + 4], "little") for at in (4, 8)] == [5, 6]
    assert [int.from_bytes(first[at : at + 8], "little") for at in (16, 24)] == [7, 8]
    assert first[32:] == b"h" * 64


def test_the_core_has_the_same_numbers() -> None:
    for kind in orders.OrderKind:
        assert getattr(core, f"ORDER_{kind.name}") == kind
    for answer in AnswerKind:
        assert getattr(core, f"ANSWER_{answer.name}") == answer


def test_the_most_moves_fit_in_one_packet() -> None:
    move = MoveOrder(0, 0, orders.NOT_FOLDED, False, 0, 0, 0, 0, orders.encode_place(3))
    order = RunOrder(0, 0, 0, 1, 0, 1)
    assert len(order.encode([move] * orders.MOST_MOVES)) <= orders.MAX_ORDER


def test_links_and_questions() -> None:
    assert orders.encode_link(3, b"abc") == bytes([4, 0, 0, 0, 3, 0, 0, 0, 3]) + bytes(7) + b"abc"
    assert orders.encode_ping(5) == bytes([3]) + bytes(7) + bytes([5]) + bytes(7)
    assert orders.encode_stage(5) == bytes([2]) + bytes(7) + bytes([5]) + bytes(7)


def test_answers_are_checked() -> None:
    header = bytes(range(64))
    told = orders.parse_answer(ANSWER + (2**40).to_bytes(8, "little") + header)
    assert told == Answer(AnswerKind.BROKEN, 7, 71, 2**40, header)
    for broken in (b"", ANSWER, bytes([9]) + ANSWER[1:] + bytes(72)):
        with pytest.raises(MalformedMessage):
            orders.parse_answer(broken)


def test_the_message_with_the_socket_says_the_generation() -> None:
    assert orders.parse_carrier(orders.encode_carrier(2**50)) == 2**50
    with pytest.raises(MalformedMessage):
        orders.parse_carrier(orders.encode_carrier(1) + b"x")
