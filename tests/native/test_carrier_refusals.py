"""What a carrier refuses: orders that do not fit, and memory and sockets that it cannot use."""

from __future__ import annotations

import errno
import os
import socket

import numpy as np
import pytest
from tests.native.carriers import (
    INSTANCE,
    MEAN,
    NOBODY,
    RESULT,
    SCRATCH,
    SHORT,
    VALUE,
    Answer,
    Lonely,
    Make,
    aim_at,
    count_descriptors,
    done,
    make_move,
    make_run,
    make_streams,
    offer,
)

from collectived_native import core
from collectived_proto.types import DType

SEND, RECEIVE, FINISH, COPY = core.MOVE_SEND, core.MOVE_RECEIVE, core.MOVE_FINISH, core.MOVE_COPY
FAR = (1 << 64) - 1
BAD_MOVES = {
    "send beyond": make_move(SEND, VALUE, 0, 11, peer=1),
    "send at the end": make_move(SEND, VALUE, 10, 1, peer=1),
    "send far": make_move(SEND, VALUE, FAR, 2, peer=1),
    "send much": make_move(SEND, VALUE, 1, FAR, peer=1),
    "send of scratch": make_move(SEND, SCRATCH, 0, 6, peer=1),
    "receive beyond": make_move(RECEIVE, RESULT, 5, 6, peer=1),
    "receive into the value": make_move(RECEIVE, VALUE, 0, 1, peer=1),
    "receive beyond mine": make_move(RECEIVE, RESULT, 5, 1, peer=1, mine=SCRATCH),
    "receive of no memory": make_move(RECEIVE, RESULT, 0, 1, peer=1, mine=3),
    "memory": make_move(RECEIVE, 3, 0, 1, peer=1),
    "kind": make_move(core.MOVE_KEEP, RESULT, 0, 1, peer=1),
    "other kind": make_move(core.MOVE_FOLD, SCRATCH, 0, 1, mine=VALUE),
    "no kind": make_move(99, RESULT, 0, 1, peer=1),
    "finish beyond": make_move(FINISH, SCRATCH, 0, 2, header=aim_at(9)),
    "finish of beyond": make_move(FINISH, SCRATCH, 5, 1, header=aim_at(0)),
    "finish far": make_move(FINISH, SCRATCH, 0, 1, header=aim_at(FAR)),
    "finish amid": make_move(FINISH, RESULT, 0, 5, header=aim_at(4)),
    "copy beyond": make_move(COPY, RESULT, 0, 2, mine=VALUE, header=aim_at(9)),
    "copy of nothing": make_move(COPY, RESULT, 0, 2, header=aim_at(0)),
    "copy into the value": make_move(COPY, VALUE, 0, 2, mine=RESULT, header=aim_at(0)),
    "copy amid": make_move(COPY, SCRATCH, 0, 3, mine=SCRATCH, header=aim_at(2)),
}


@pytest.mark.parametrize("name", BAD_MOVES)
def test_moves_that_do_not_fit_are_refused_before_anything_moves(lonely: Lonely, name: str) -> None:
    rank, far = lonely
    offer(rank, np.ones(10, np.float32), np.zeros(10, np.float32))
    good = make_move(SEND, VALUE, 0, 10, peer=1)
    refused = Answer(core.ANSWER_REFUSED, NOBODY, errno.EINVAL, INSTANCE)
    assert rank.ask(make_run([good, BAD_MOVES[name]], scratch=20)) == refused
    assert rank.carrier.progress() == (0, 0)
    assert rank.ask(make_run([good], scratch=20)) == done()
    far.recv(1)


def test_unknown_peers_are_refused(make_ranks: Make) -> None:
    rank = make_ranks(2)[0]
    offer(rank, np.ones(1, np.float32), np.zeros(1, np.float32))
    rank.link(5, None, b"of no link")
    for kind, memory, peer in ((SEND, VALUE, 5), (RECEIVE, RESULT, 5), (SEND, VALUE, FAR >> 32)):
        answer = rank.ask(make_run([make_move(kind, memory, 0, 1, peer=peer)]))
        assert answer == Answer(core.ANSWER_REFUSED, peer, errno.ENOTCONN, INSTANCE)


FOLDS = [make_move(RECEIVE, RESULT, 0, 1, peer=1, mine=VALUE)]
BAD_TERMS = {
    "float16": make_run(FOLDS, dtype=int(DType.FLOAT16), row=2),
    "mean of integers": make_run(FOLDS, dtype=int(DType.INT64), op=MEAN, row=8),
    "row": make_run(FOLDS, row=8),
    "no row": make_run([], op=0, row=0),
    "dtype": make_run(FOLDS, dtype=99),
    "negative dtype": make_run(FOLDS, dtype=-1),
    "op": make_run(FOLDS, op=99),
    "divisor": make_run(FOLDS, op=MEAN, divisor=0),
    "nothing is folded": make_run(FOLDS, op=0),
    "nothing is finished": make_run([make_move(FINISH, SCRATCH, 0, 1, header=aim_at(0))], op=0, scratch=4),
}


@pytest.mark.parametrize("name", BAD_TERMS)
def test_arithmetic_that_is_not_defined_is_refused(lonely: Lonely, name: str) -> None:
    rank, _ = lonely
    offer(rank, np.ones(10, np.float32), np.zeros(10, np.float32))
    assert rank.ask(BAD_TERMS[name]) == Answer(core.ANSWER_REFUSED, NOBODY, errno.EINVAL, INSTANCE)


def test_memory_that_is_not_there_is_refused(lonely: Lonely) -> None:
    rank, _ = lonely
    offer(rank, None, None)
    for move in (make_move(SEND, VALUE, 0, 1, peer=1), make_move(RECEIVE, RESULT, 0, 1, peer=1)):
        assert rank.ask(make_run([move])).error == errno.EINVAL
    rank.carrier.offer(8, b"abc", None, None)
    assert rank.ask(SHORT.pack(core.ORDER_STAGE, 8)).kind == core.ANSWER_REFUSED
    huge = make_run([], scratch=1 << 62)
    assert rank.ask(huge) == Answer(core.ANSWER_REFUSED, NOBODY, errno.ENOMEM, INSTANCE)
    assert rank.ask(make_run([])) == done()


@pytest.mark.parametrize(
    "order",
    [
        b"x",
        bytes(16),
        SHORT.pack(9, 0),
        SHORT.pack(core.ORDER_RUN, 0),
        make_run([], instance=0) + b"x",
        make_run(FOLDS, instance=0)[:-1],
        make_run([bytes(96)] * 1500, instance=0)[:-96],
        SHORT.pack(core.ORDER_STAGE, 0) + b"x",
    ],
    ids=len,
)
def test_malformed_orders_are_refused(make_ranks: Make, order: bytes) -> None:
    (rank,) = make_ranks(1)
    assert rank.ask(order) == Answer(core.ANSWER_REFUSED, NOBODY, errno.EBADMSG, 0)
    rank.ping(1)


def test_orders_for_unknown_instances_are_refused(make_ranks: Make) -> None:
    (rank,) = make_ranks(1)
    assert rank.ask(make_run([], instance=3)) == Answer(core.ANSWER_REFUSED, NOBODY, errno.ENOENT, 3)


def test_offers_that_do_not_fit_are_refused(make_ranks: Make) -> None:
    (rank,) = make_ranks(1)
    memory = np.zeros(100, np.uint8)
    rank.carrier.offer(1, memory[:50], memory[50:], None)
    rank.carrier.offer(2, memory[:50], memory, None)
    for instance, value, result, staging in (
        (1, None, None, None),
        (3, memory[:50], memory[49:], None),
        (3, memory[1:], memory[:50], None),
        (3, memory[:50], None, memory[51:]),
        (3, memory[:50], None, memory[49:99]),
        (3, None, None, memory),
    ):
        with pytest.raises(ValueError, match=r"\d|amid"):
            rank.carrier.offer(instance, value, result, staging)
    with pytest.raises((BufferError, ValueError)):
        rank.carrier.offer(3, memory[::2], None, None)
    with pytest.raises((BufferError, ValueError)):
        rank.carrier.offer(3, None, b"read only", None)
    rank.carrier.offer(3, None, None, None)


def test_no_offers_are_taken_of_one_that_is_closed(make_ranks: Make) -> None:
    (rank,) = make_ranks(1)
    rank.carrier.close()
    with pytest.raises(ValueError, match="closed"):
        offer(rank, None, None)


def test_no_more_links_than_there_is_room_for(make_ranks: Make) -> None:
    (rank,) = make_ranks(1)
    before = count_descriptors()
    near, far = make_streams("unix")
    with near, far:
        for peer in range(core.MOST_LINKS + 1):
            rank.link(peer, near.dup())
        rank.ping(1)
        assert count_descriptors() == before + 2 + core.MOST_LINKS
        offer(rank, np.ones(1, np.float32), None)
        answer = rank.ask(make_run([make_move(SEND, VALUE, 0, 1, peer=core.MOST_LINKS)]))
        assert answer.error == errno.ENOTCONN
        near.close()
        rank.close()
        assert far.recv(1) == b""


def test_descriptors_of_other_orders_are_closed(make_ranks: Make) -> None:
    (rank,) = make_ranks(1)
    near, far = make_streams("unix")
    with near, far:
        socket.send_fds(rank.worker, [b"x"], [far.fileno()])
        assert rank.hear().kind == core.ANSWER_REFUSED
        far.close()
        assert near.recv(1) == b""


def test_orders_come_over_a_socket_of_datagrams() -> None:
    before = count_descriptors()
    near, far = socket.socketpair()
    for descriptor in (near.detach(), os.open("/dev/null", os.O_RDONLY), 1 << 20):
        with pytest.raises(OSError, match=r"."):
            core.carrier(descriptor)
    far.close()
    assert count_descriptors() == before
