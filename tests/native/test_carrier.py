"""What a carrier moves between arrays and streams, what ends that, and that it lets go of all it had."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import threading
from typing import Any

import numpy as np
import pytest
from tests.native.carriers import (
    INSTANCE,
    MEAN,
    NOBODY,
    RESULT,
    SCRATCH,
    SHORT,
    SUM,
    VALUE,
    Answer,
    Lonely,
    Make,
    Rank,
    aim_at,
    count_descriptors,
    done,
    join,
    make_header,
    make_move,
    make_run,
    offer,
    stall,
)
from tests.native.ranks import LIMIT_SECONDS
from tests.native.test_direct import end_in_time

from collectived_native import core
from collectived_proto.types import DType

SIZES = [1, 2, 3, 1001, 65_536, 2_097_152]  # elements: up to 8 MiB


def split(count: int, ranks: int) -> list[tuple[int, int]]:
    """Where each rank's share begins, and its elements."""
    ends = [count * number // ranks for number in range(ranks + 1)]
    return [(begin, end - begin) for begin, end in zip(ends, ends[1:], strict=False)]


def plan_ring(me: int, ranks: int, count: int) -> list[bytes]:
    """All ranks fold their own share round the ring, finish it, and pass the results on."""
    shares, moves = split(count, ranks), []
    after, before = (me + 1) % ranks, (me - 1) % ranks
    for step in range(ranks - 1):
        gone, come = shares[(me - step - 1) % ranks], shares[(me - step - 2) % ranks]
        memory = SCRATCH if step else VALUE
        moves.append(make_move(core.MOVE_SEND, memory, *gone, round=step, peer=after))
        moves.append(make_move(core.MOVE_RECEIVE, SCRATCH, *come, round=step, peer=before, mine=VALUE, left=True))
    begin, length = shares[me]
    moves.append(make_move(core.MOVE_FINISH, SCRATCH, begin, length, round=ranks - 1, header=aim_at(begin)))
    for step in range(ranks - 1):
        gone, come = shares[(me - step) % ranks], shares[(me - step - 1) % ranks]
        moves.append(make_move(core.MOVE_SEND, RESULT, *gone, round=ranks - 1 + step, peer=after))
        moves.append(make_move(core.MOVE_RECEIVE, RESULT, *come, round=ranks - 1 + step, peer=before))
    return moves


@pytest.mark.parametrize("op", [SUM, MEAN], ids=["sum", "mean"])
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in_place"])
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(("number", "kind"), [(2, "tcp"), (3, "tcp"), (3, "unix")])
def test_a_ring_reduces(make_ranks: Make, number: int, kind: str, count: int, in_place: bool, op: int) -> None:
    ranks = make_ranks(number, kind)
    values = [np.arange(count, dtype=np.float32) % 1000 * (me + 1) for me in range(number)]
    total = sum(value.copy() for value in values) / np.float32(number if op == MEAN else 1)
    results = values if in_place else [np.full(count, 77, np.float32) for _ in ranks]
    for me, rank in enumerate(ranks):
        offer(rank, values[me], results[me])
        order = make_run(plan_ring(me, number, count), op=op, divisor=number, scratch=4 * count)
        rank.order(order)
    for rank, result in zip(ranks, results, strict=True):
        assert rank.hear() == done()
        rank.carrier.withdraw(INSTANCE)
        np.testing.assert_array_equal(result, total)
    sent = [rank.carrier.progress()[0] for rank in ranks]
    assert sum(sent) == sum(rank.carrier.progress()[1] for rank in ranks)
    assert sum(sent) == number * 2 * (number - 1) * 64 + 2 * (number - 1) * 4 * count


@pytest.mark.parametrize("count", [1, 1001, 8 << 20])
def test_a_broadcast_lands_in_the_result(make_ranks: Make, count: int) -> None:
    ranks = make_ranks(3)
    value, results = np.arange(count).astype(np.uint8), [np.zeros(count, np.uint8) for _ in range(3)]
    sends = [make_move(core.MOVE_SEND, VALUE, 0, count, peer=peer) for peer in (1, 2)]
    copy = make_move(core.MOVE_COPY, RESULT, 0, count, mine=VALUE, header=aim_at(0))
    offer(ranks[0], value, results[0])
    ranks[0].order(make_run([copy, *sends], op=0, row=1))
    for rank, result in zip(ranks[1:], results[1:], strict=True):
        offer(rank, None, result)
        rank.order(make_run([make_move(core.MOVE_RECEIVE, RESULT, 0, count)], op=0, row=1))
    assert [rank.hear() for rank in ranks] == 3 * [done()]
    for result in results:
        np.testing.assert_array_equal(result, value)


def test_moves_of_one_peer_keep_their_order_and_those_of_others_do_not_wait(
    make_ranks: Make,
) -> None:
    ranks = make_ranks(3, "unix")
    result = np.zeros(4, np.float32)
    first, second = make_header(11), make_header(12)
    receives = [
        make_move(core.MOVE_RECEIVE, RESULT, 0, 1, peer=1, header=first),
        make_move(core.MOVE_RECEIVE, RESULT, 1, 1, peer=1, header=second),
        make_move(core.MOVE_RECEIVE, RESULT, 2, 2, peer=2, header=first),
    ]
    offer(ranks[0], None, result)
    ranks[0].order(make_run(receives))
    offer(ranks[2], np.array([3, 4], np.float32), None)
    assert ranks[2].ask(make_run([make_move(core.MOVE_SEND, VALUE, 0, 2, header=first)])) == done()
    offer(ranks[1], np.array([1, 2], np.float32), None)
    sends = [make_move(core.MOVE_SEND, VALUE, at, 1, header=header) for at, header in enumerate((first, second))]
    assert ranks[1].ask(make_run(sends)) == done()
    assert ranks[0].hear() == done()
    assert result.tolist() == [1, 2, 3, 4]


def test_what_comes_in_pieces_of_elements_is_folded_whole(lonely: Lonely) -> None:
    rank, far = lonely
    mine, theirs = np.arange(50, dtype=np.float64), np.arange(50, dtype=np.float64)[::-1].copy()
    result = np.zeros(50)
    offer(rank, mine, result)
    move = make_move(core.MOVE_RECEIVE, RESULT, 0, 50, peer=1, mine=VALUE)
    rank.order(make_run([move], dtype=int(DType.FLOAT64), row=8))
    frame = make_header(1) + theirs.tobytes()
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(0, len(frame), 7):
        far.sendall(frame[at : at + 7])
        while rank.carrier.progress()[1] < min(at + 7, len(frame)):
            os.sched_yield()
    assert rank.hear() == done()
    np.testing.assert_array_equal(result, mine + theirs)


@pytest.mark.parametrize("nbytes", [1, 3 << 20])
def test_a_value_is_staged(make_ranks: Make, nbytes: int) -> None:
    (rank,) = make_ranks(1)
    value, staging = np.arange(nbytes).astype(np.uint8), np.zeros(nbytes, np.uint8)
    offer(rank, value, None, staging)
    assert rank.ask(SHORT.pack(core.ORDER_STAGE, INSTANCE)) == Answer(core.ANSWER_STAGED, NOBODY, 0, INSTANCE)
    np.testing.assert_array_equal(staging, value)


def test_a_ping_is_answered_amid_a_run_and_other_orders_wait(lonely: Lonely) -> None:
    rank, far = lonely
    staging = np.zeros(3, np.uint8)
    stall(rank)
    rank.ping(4)
    rank.carrier.offer(8, b"abc", None, staging)
    rank.order(SHORT.pack(core.ORDER_STAGE, 8))
    rank.order(SHORT.pack(core.ORDER_PING, 5))
    far.sendall(make_header(1) + bytes(4000))
    answers = [rank.hear() for _ in range(3)]
    assert answers[0] == done()
    assert {(one.kind, one.number) for one in answers[1:]} == {(core.ANSWER_STAGED, 8), (core.ANSWER_PONG, 5)}
    assert bytes(staging) == b"abc"


def test_what_is_withdrawn_amid_a_run_is_not_written_afterwards(
    lonely: Lonely,
) -> None:
    rank, far = lonely
    result = stall(rank)
    far.sendall(make_header(1) + bytes([255]) * 100)
    while rank.carrier.progress()[1] < 164:
        os.sched_yield()
    rank.carrier.withdraw(INSTANCE)
    before = result.copy()
    assert rank.hear() == Answer(core.ANSWER_BROKEN, NOBODY, errno.ECANCELED, INSTANCE)
    far.sendall(bytes([255]) * 3900)
    rank.carrier.offer(8, None, result, None)
    assert rank.ask(make_run([], instance=8)).kind == core.ANSWER_BROKEN
    rank.ping(9)
    np.testing.assert_array_equal(result.view(np.uint8), before.view(np.uint8))
    assert (before.view(np.uint8)[:100] == 255).all()
    assert not before.view(np.uint8)[100:].any()
    rank.carrier.withdraw(INSTANCE)


@pytest.mark.parametrize("ordered", [core.ORDER_RUN, core.ORDER_STAGE])
def test_whenever_memory_is_withdrawn_it_is_not_written_afterwards(make_ranks: Make, ordered: int) -> None:
    count = 8 << 20
    value = np.arange(count, dtype=np.uint8)
    copy = make_move(core.MOVE_COPY, RESULT, 0, count, mine=VALUE, header=aim_at(0))
    order = make_run([copy], op=0, row=1) if ordered == core.ORDER_RUN else SHORT.pack(ordered, INSTANCE)
    complete = core.ANSWER_DONE if ordered == core.ORDER_RUN else core.ANSWER_STAGED
    for rank in make_ranks(8):
        written = np.zeros(count, np.uint8)
        offer(rank, value, *((written,) if ordered == core.ORDER_RUN else (None, written)))
        rank.order(order)
        withdrawing = threading.Thread(target=rank.carrier.withdraw, args=(INSTANCE,))
        withdrawing.start()
        rank.carrier.withdraw(INSTANCE)
        before = written.copy()
        answer = rank.hear()
        withdrawing.join(LIMIT_SECONDS)
        np.testing.assert_array_equal(written, before)
        if answer.kind == complete:
            np.testing.assert_array_equal(written, value)
        elif answer.kind == core.ANSWER_REFUSED:
            assert answer.error == errno.ENOENT
            assert not written.any()
        else:
            assert answer == Answer(core.ANSWER_BROKEN, NOBODY, errno.ECANCELED, INSTANCE)


def test_withdrawing_lets_go_of_the_memory(make_ranks: Make) -> None:
    (rank,) = make_ranks(1)
    memory = bytearray(100)
    rank.carrier.offer(INSTANCE, memory, memory, None)
    with pytest.raises(BufferError):
        memory.append(1)
    for instance in (INSTANCE, INSTANCE, 99):
        rank.carrier.withdraw(instance)
    memory.append(1)
    rank.carrier.offer(INSTANCE, memory, None, None)
    rank.carrier.close()
    memory.append(2)


def test_many_instances_are_offered_at_once(make_ranks: Make) -> None:
    (rank,) = make_ranks(1)
    staged = [bytearray(1) for _ in range(100)]
    for number, staging in enumerate(staged):
        rank.carrier.offer(number, bytes([number]), None, staging)
    for number in reversed(range(100)):
        assert rank.ask(SHORT.pack(core.ORDER_STAGE, number)).kind == core.ANSWER_STAGED
        rank.carrier.withdraw(number)
    assert b"".join(staged) == bytes(range(100))
    assert rank.ask(SHORT.pack(core.ORDER_STAGE, 5)) == Answer(core.ANSWER_REFUSED, NOBODY, errno.ENOENT, 5)


@pytest.mark.parametrize("came", [0, 30, 64, 500])
def test_the_end_of_a_peer_breaks_the_carrier(lonely: Lonely, came: int) -> None:
    rank, far = lonely
    stall(rank)
    far.sendall((make_header(1) + bytes(4000))[:came])
    far.close()
    broken = Answer(core.ANSWER_BROKEN, 1, 0, INSTANCE)
    assert rank.hear() == broken
    assert rank.ask(make_run([])) == broken


def test_a_peer_that_does_not_read_and_is_gone_breaks_the_carrier(
    lonely: Lonely,
) -> None:
    rank, far = lonely
    value = np.zeros(64 << 20, np.uint8)
    offer(rank, value, None)
    rank.order(make_run([make_move(core.MOVE_SEND, VALUE, 0, len(value), peer=1)], op=0, row=1))
    far.recv(1)
    far.close()
    found = rank.hear()
    assert (found.kind, found.peer, found.number) == (core.ANSWER_BROKEN, 1, INSTANCE)
    assert found.error in (errno.EPIPE, errno.ECONNRESET)


def test_the_end_of_a_peer_that_is_not_used_does_not_matter(make_ranks: Make) -> None:
    ranks = make_ranks(3)
    ranks[2].close()
    offer(ranks[0], np.arange(5, dtype=np.float32), None)
    result = np.zeros(5, np.float32)
    offer(ranks[1], None, result)
    ranks[0].order(make_run([make_move(core.MOVE_SEND, VALUE, 0, 5, peer=1)]))
    assert ranks[1].ask(make_run([make_move(core.MOVE_RECEIVE, RESULT, 0, 5)])) == done()
    assert ranks[0].hear() == done()
    assert result.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("wrong", [0, 63])
def test_another_header_breaks_the_carrier(lonely: Lonely, wrong: int) -> None:
    rank, far = lonely
    result = stall(rank)
    header = bytearray(make_header(1))
    header[wrong] ^= 1
    far.sendall(header + bytes([255]) * 4000)
    assert rank.hear() == Answer(core.ANSWER_BROKEN, 1, errno.EPROTO, INSTANCE)
    assert rank.header == header
    assert not result.any()


def test_closing_amid_a_run_closes_everything(make_ranks: Make) -> None:
    before = count_descriptors()
    ranks = [Rank(), Rank()]
    join(ranks, "tcp")
    memory = bytearray(4000)
    ranks[0].carrier.offer(INSTANCE, None, memory, None)
    ranks[0].order(make_run([make_move(core.MOVE_RECEIVE, RESULT, 0, 1000, peer=1)]))
    ranks[0].ping(1)
    for rank in ranks:
        rank.close()
        rank.carrier.close()
        rank.carrier.withdraw(INSTANCE)
    memory.append(1)
    assert count_descriptors() == before


def test_one_that_is_dropped_is_closed() -> None:
    before = count_descriptors()
    ranks = [Rank(), Rank()]
    join(ranks, "unix")
    memory = bytearray(1)
    ranks[0].carrier.offer(INSTANCE, memory, None, None)
    for rank in ranks:
        rank.worker.close()
    ranks.clear()
    del rank
    gc.collect()
    memory.append(1)
    assert count_descriptors() == before


def test_a_run_ends_with_its_worker(lonely: Lonely) -> None:
    rank, far = lonely
    value = np.zeros(64 << 20, np.uint8)
    offer(rank, value, None)
    rank.order(make_run([make_move(core.MOVE_SEND, VALUE, 0, len(value), peer=1)], op=0, row=1))
    far.recv(1)
    rank.order(SHORT.pack(core.ORDER_STAGE, INSTANCE))  # which waits: the end is noticed all the same
    rank.worker.close()
    rank.carrier.withdraw(INSTANCE)
    left = len(value)
    with contextlib.suppress(ConnectionResetError):
        while piece := far.recv(1 << 20):  # to the end of the link
            left -= len(piece)
    assert left


def test_a_forked_child_lets_go_of_it(lonely: Lonely) -> None:
    rank, far = lonely
    stall(rank)
    child = os.fork()
    if not child:
        end_in_time()
        status = 1
        try:
            rank.carrier.withdraw(INSTANCE)
            with pytest.raises(ValueError, match="forked"):
                rank.carrier.offer(9, None, None, None)
            before = count_descriptors()
            rank.carrier.close()
            rank.carrier.close()
            assert count_descriptors() == before - 3
            del rank.carrier
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    far.sendall(make_header(1) + bytes(4000))
    assert rank.hear() == done()
    rank.close()
    assert far.recv(1) == b""


def test_scratch_is_kept_and_grows(make_ranks: Make) -> None:
    (rank,) = make_ranks(1)
    for count in (10, 5, 100_000):
        value, result = np.arange(count, dtype=np.float32), np.zeros(count, np.float32)
        offer(rank, value, result)
        moves: list[Any] = [
            make_move(core.MOVE_COPY, SCRATCH, 0, count, mine=VALUE, header=aim_at(0)),
            make_move(core.MOVE_FINISH, SCRATCH, 0, count, round=3, header=aim_at(0)),
        ]
        assert rank.ask(make_run(moves, op=MEAN, divisor=2, scratch=4 * count)) == done()
        rank.carrier.withdraw(INSTANCE)
        np.testing.assert_array_equal(result, value / 2)
