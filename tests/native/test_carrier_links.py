"""Links that come with a carrier's orders, bytes that its worker has read of them, and which results are written."""

from __future__ import annotations

import errno
import socket

import numpy as np
import pytest
from tests.native.carriers import (
    INSTANCE,
    RESULT,
    SCRATCH,
    VALUE,
    Answer,
    Lonely,
    Make,
    aim_at,
    count_descriptors,
    done,
    make_header,
    make_move,
    make_run,
    make_streams,
    offer,
    stall,
)

from collectived_native import core

HEADER = make_header(1)


def exchange(peer: int) -> bytes:
    moves = [
        make_move(core.MOVE_SEND, VALUE, 0, 1000, peer=peer),
        make_move(core.MOVE_RECEIVE, RESULT, 0, 1000, peer=peer, mine=VALUE),
    ]
    return make_run(moves)


@pytest.mark.parametrize("read", [0, 1, 64, 65, 1001, 4064])
def test_bytes_that_the_worker_has_read_come_first(make_ranks: Make, read: int) -> None:
    rank, other = make_ranks(1)[0], make_ranks(1)[0]
    near, far = make_streams("tcp")
    value, results = np.arange(1000, dtype=np.float32), [np.zeros(1000, np.float32) for _ in range(2)]
    other.link(5, far)
    offer(other, value, results[1])
    other.order(exchange(5))
    unread = near.recv(read, socket.MSG_WAITALL) if read else b""
    rank.link(9, near, unread[: read // 2])
    if read:
        rank.link(9, None, unread[read // 2 :])
    offer(rank, 2 * value, results[0])
    assert rank.ask(exchange(9)) == done()
    assert other.hear() == done()
    for one in results:
        np.testing.assert_array_equal(one, 3 * value)


def test_a_link_whose_descriptor_is_lost_breaks_the_carrier(make_ranks: Make) -> None:
    """A process that has as many descriptors as it may gets the order without."""
    (rank,) = make_ranks(1)
    rank.carrier.offer(INSTANCE, None, bytearray(4), None)
    rank.link(1, None)
    receive = make_run([make_move(core.MOVE_RECEIVE, RESULT, 0, 4, peer=1)], op=0, row=1)
    assert rank.ask(receive) == Answer(core.ANSWER_BROKEN, 1, errno.EMFILE, INSTANCE)


def test_bytes_beyond_an_order_wait_for_the_next(make_ranks: Make) -> None:
    (rank,) = make_ranks(1)
    near, far = make_streams("unix")
    rank.link(1, far, HEADER + b"abcd" + HEADER + b"ef")
    memory = bytearray(4)
    rank.carrier.offer(INSTANCE, None, memory, None)
    receive = make_run([make_move(core.MOVE_RECEIVE, RESULT, 0, 4, peer=1)], op=0, row=1)
    assert rank.ask(receive) == done()
    assert memory == b"abcd"
    with near:
        near.sendall(b"gh")
        assert rank.ask(receive) == done()
    assert memory == b"efgh"


def test_a_link_takes_the_place_of_another(make_ranks: Make) -> None:
    (rank,) = make_ranks(1)
    before = count_descriptors()
    (old, gone), (near, far) = make_streams("unix"), make_streams("unix")
    rank.link(1, gone, b"old")
    rank.link(1, far, HEADER + b"n")
    with old:
        assert old.recv(1) == b""
    memory = bytearray(3)
    rank.carrier.offer(INSTANCE, None, memory, None)
    with near:
        near.sendall(b"ew")
        assert rank.ask(make_run([make_move(core.MOVE_RECEIVE, RESULT, 0, 3, peer=1)], op=0, row=1)) == done()
        assert memory == b"new"
        rank.carrier.close()
        assert near.recv(1) == b""
    assert count_descriptors() == before - 2  # without those of the carrier


def test_links_end_with_the_worker(lonely: Lonely) -> None:
    rank, far = lonely
    rank.worker.close()
    assert far.recv(1) == b""


@pytest.mark.parametrize("came", [0, 63, 65])
def test_withdrawing_tells_whether_the_result_may_be_written(lonely: Lonely, came: int) -> None:
    rank, far = lonely
    stall(rank)
    far.sendall((HEADER + bytes(4000))[:came])
    while rank.carrier.progress()[1] < came:
        rank.ping(1)
    assert rank.carrier.withdraw(INSTANCE) == (came > 64)
    assert rank.carrier.withdraw(INSTANCE)  # it is not known any more


@pytest.mark.parametrize("kind", [core.MOVE_COPY, core.MOVE_FINISH])
def test_what_is_computed_into_the_result_is_written(make_ranks: Make, kind: int) -> None:
    (rank,) = make_ranks(1)
    value, result = np.ones(4, np.float32), np.zeros(4, np.float32)
    offer(rank, value, result)
    scratch = make_move(core.MOVE_COPY, SCRATCH, 0, 4, mine=VALUE, header=aim_at(0))
    assert rank.ask(make_run([scratch], scratch=16)) == done()
    rank.carrier.offer(8, value, result, None)
    move = make_move(kind, RESULT if kind == core.MOVE_COPY else SCRATCH, 0, 4, mine=SCRATCH, header=aim_at(0))
    assert rank.ask(make_run([scratch, move], instance=8, scratch=16)) == done(8)
    assert result.tolist() == value.tolist()
    assert not rank.carrier.withdraw(INSTANCE)
    assert rank.carrier.withdraw(8)
