"""Ranks that match their messages by themselves: they get each at once, and their worker watches what they wait for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.runtime.engine.conftest import wait_for

from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.ipc.rank_messages import Unclaimed
from collectived_proto.types import ANY_SOURCE, Recv, ReportKind, Send
from collectived_runtime.engine.base import arenas
from collectived_runtime.engine.p2p import deliveries, message_memory

spread = pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
BUDGET = 1 << 30  # of each worker


def numbers(count: int, first: float = 0.0) -> Any:
    return first + np.arange(count, dtype=np.float32)


def limit_unexpected(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    patch.setattr(arenas, "UNEXPECTED_MEMORY_DIVISOR", BUDGET // nbytes)


@spread
def test_messages_that_have_come_before_are_handed_over_in_their_order_and_later_ones_at_once(
    world: Any, hosts: Any
) -> None:
    here = world(*hosts)
    sender, receiver = here.ranks
    tags = [7, 8, 7, 0, 8]
    for number, tag in enumerate(tags[:3]):
        sender.post(Send(1, tag), numbers(3, 10.0 * number))
        sender.done()
    receiver.match()
    for number, tag in enumerate(tags):
        if number >= 3:
            sender.post(Send(1, tag), numbers(3, 10.0 * number))
            sender.done()
        told = receiver.delivered()
        assert (told.generation, told.source, told.tag) == (here.group.generation, 0, tag)
        assert receiver.outlined(told)[0].ravel().tolist() == numbers(3, 10.0 * number).tolist()


def test_messages_of_several_senders_are_handed_over_as_they_came(world: Any) -> None:
    here = world(3)
    receiver = here.ranks[2]
    order = [0, 1, 1, 0, 2]
    for rank in order:
        here.ranks[rank].post(Send(2, rank), numbers(1))
        here.ranks[rank].done()
    receiver.match()
    assert [receiver.delivered().source for _ in order] == order


@spread
def test_a_slot_that_was_handed_over_is_free_when_its_rank_releases_it(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    sender, receiver = here.ranks
    receiver.match()
    sender.post(Send(1), numbers(5))
    slots = here.group_loop_of(1)._results._slots
    told = receiver.delivered()
    assert slots[told.slot].holders == {1}
    receiver.release(told.slot)
    wait_for(lambda: told.slot not in slots)


@spread
def test_what_is_handed_over_counts_where_it_was_sent_alone(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    here.ranks[1].match()
    here.ranks[0].post(Send(1), numbers(5))
    here.ranks[0].done()
    here.ranks[1].delivered()
    counted = [name for one in here.group_loops for name, _ in one.counters.totals]
    assert counted == ["send"]


def test_a_rank_that_does_not_read_gets_all_that_came_in_order_when_it_does(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "MOST_UNREAD", 4)
    here = world(2)
    sender, receiver = here.ranks
    receiver.match()
    count = 1000  # more than a doorbell has room for
    for number in range(count):
        sender.post(Send(1, number), numbers(1))
        sender.done()
    kept = here.group_loops[0]._generation.point_to_point._deliveries._kept
    assert receiver.local_rank.unread_count <= 4 < len(kept[1])
    assert [receiver.delivered().tag for _ in range(count)] == list(range(count))
    wait_for(lambda: not kept)


def test_what_a_rank_has_not_heard_of_is_free_when_its_generation_ends(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "MOST_UNREAD", 0)
    here = world(2)
    sender, receiver = here.ranks
    receiver.match()
    sender.post(Send(1), numbers(1))
    sender.done()
    point_to_point = here.group_loops[0]._generation.point_to_point
    wait_for(lambda: point_to_point._deliveries._kept)
    here.rule(here.verdict(Code.INVALID_ARGUMENT, successor=101))
    sender.posted = messages.P2P_BASE
    sender.post(Send(0), numbers(1), generation=101)
    sender.done()
    assert len(here.group_loops[0]._results._slots) == 1, "that of the message to itself"


def test_what_nobody_has_asked_for_is_given_back_when_its_receiver_goes(world: Any) -> None:
    here = world(3)
    sender, receiver, other = here.ranks
    receiver.match()
    for _ in range(3):
        sender.post(Send(1), numbers(10))
        sender.done()
    receiver.delivered()
    receiver.doorbell.close()
    assert here.report(ReportKind.LOST).rank == 1
    sender.post(Send(1), numbers(10))  # for nobody
    sender.post(Send(2), numbers(1))
    other.post(Recv(0))
    last = other.done()
    assert set(here.group_loops[0]._results._slots) == {last.slot}


# Generations


def test_who_says_so_of_the_next_generation_matches_from_its_beginning(world: Any) -> None:
    here = world(1, 1)
    sender, receiver = here.ranks
    receiver.match(101)
    receiver.match(101)
    asked = receiver.post(Recv(0))  # of this one its worker matches
    sender.post(Send(1, 0), numbers(1))
    assert receiver.done().instance == asked
    here.rule(here.verdict(Code.INVALID_ARGUMENT, successor=101))
    sender.posted = messages.P2P_BASE
    sender.post(Send(1, 3), numbers(1), generation=101)
    told = receiver.delivered()
    assert (told.generation, told.tag) == (101, 3)
    receiver.match()  # of a past one
    sender.post(Send(1, 4), numbers(1), generation=101)
    assert receiver.delivered().tag == 4


# What a rank may not do


def test_a_rank_that_matches_by_itself_gives_its_worker_no_receive(world: Any) -> None:
    here = world(2)
    here.ranks[0].match()
    here.ranks[0].post(Recv(1, 3))
    report = here.report(ReportKind.LOST)
    assert report.rank == 0 and "recv(source=1, tag=3) of rank 0, which matches by itself" in report.text


def test_a_rank_matches_by_itself_before_it_has_given_its_worker_a_receive(world: Any) -> None:
    here = world(2)
    here.ranks[0].post(Recv(1))
    here.ranks[0].match()
    assert "has submitted receives" in here.report(ReportKind.LOST).text


def test_it_may_say_so_twice_and_leave_numbers_out(world: Any) -> None:
    here = world(2)
    sender, receiver = here.ranks
    for rank in here.ranks:
        rank.match()
        rank.match()
    for skipped in (0, 5, 0, 1):
        sender.posted += skipped
        number = sender.post(Send(1, skipped), numbers(1))
        assert sender.done().instance == number
        assert receiver.delivered().tag == skipped
    sender.posted = number
    sender.post(Send(1), numbers(1))  # once more
    assert sender.done().instance == number
    sender.post(Send(1, 99), numbers(1))
    assert receiver.delivered().tag == 99, "the repeated one was not sent again"


# What it waits for


@spread
@pytest.mark.parametrize("source", [0, ANY_SOURCE])
def test_a_receive_that_waits_for_long_is_reported_until_it_is_settled(world: Any, hosts: Any, source: int) -> None:
    here = world(*hosts, stall_after=0.02)
    receiver = here.ranks[1]
    receiver.match()
    receiver.posted += 7  # carried out by itself
    number = receiver.post(Recv(source, 3), watched=True)
    report = here.report(ReportKind.UNANSWERED)
    assert (report.rank, report.peer) == (1, source) and "recv(" in report.text
    ops = here.group_loop_of(1)._generation.point_to_point.ops
    assert [post.number for post in ops.posts] == [number]
    receiver.doorbell.send(messages.Completion(number, 0, True, False).encode())
    wait_for(lambda: not ops.posts)


@spread
def test_a_receive_ends_alone_at_its_deadline(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    receiver = here.ranks[1]
    receiver.match()
    number = receiver.post(Recv(0), watched=True, remaining=0.02)
    assert receiver.withdrawn() == messages.Withdrawal(here.group.generation, number, Code.DEADLINE_EXCEEDED)
    assert not here.group_loop_of(1).pending_ops and here.reports.empty()


@spread
def test_a_receive_that_its_rank_has_taken_back_is_watched_no_more(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    receiver, group_loop = here.ranks[1], here.group_loop_of(1)
    receiver.match()
    number = receiver.post(Recv(0), watched=True)
    wait_for(lambda: group_loop.pending_ops)
    receiver.doorbell.send(messages.Withdrawal(here.group.generation, number, Code.CANCELLED).encode())
    wait_for(lambda: not group_loop.pending_ops)


@spread
def test_a_send_beyond_its_deadline_is_reported_and_so_is_a_receive_of_which_a_part_has_come(
    world: Any, hosts: Any
) -> None:
    here = world(*hosts)
    first, second = here.ranks
    for rank in here.ranks:
        rank.match()
    first.post(Send(1, 2), numbers(4), watched=True, remaining=0.02)
    report = here.report(ReportKind.OVERDUE)
    assert (report.rank, report.peer, report.text) == (0, 1, "send(to=1, tag=2) at test.py:1")
    here = world(*hosts)
    second = here.ranks[1]
    second.match()
    number = second.post(Recv(ANY_SOURCE), watched=True)
    second.doorbell.send(messages.OverdueReceive(here.group.generation, number, 0).encode())
    report = here.report(ReportKind.OVERDUE)
    assert (report.rank, report.peer) == (1, 0)


@spread
def test_what_waits_fails_by_the_verdict_and_what_is_told_later_at_once(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    for rank in here.ranks:
        rank.match()
    sent = here.ranks[0].post(Send(1), numbers(1), watched=True)
    asked = here.ranks[1].post(Recv(0), watched=True)
    wait_for(lambda: sum(len(one.pending_ops) for one in here.group_loops) == 2)
    here.rule(here.verdict(Code.UNAVAILABLE))
    for rank, number in zip(here.ranks, (sent, asked), strict=True):
        failed, verdict = rank.failed()
        assert (failed, verdict.code) == (number, Code.UNAVAILABLE)
        later = rank.post(Recv(1 - rank.rank), watched=True)
        assert rank.failed()[0] == later
    assert not any(one.pending_ops for one in here.group_loops)


def test_a_receive_from_a_rank_that_has_left_fails_alone(world: Any) -> None:
    here = world(1, 1, 1)
    receiver = here.ranks[1]
    receiver.match()
    number = receiver.post(Recv(0), watched=True)
    kept = receiver.post(Recv(2), watched=True)
    here.rule(replace(here.verdict(Code.ABORTED), orderly=True, missing=(here.group.members[0],)))
    assert receiver.failed()[0] == number
    assert [post.number for post in here.group_loops[1].pending_ops] == [kept]


@pytest.mark.parametrize("says_so", [True, False])
def test_what_is_watched_does_not_keep_a_group_loop_whose_rank_has_gone(world: Any, says_so: bool) -> None:
    here = world(1, 1)
    rank, group_loop = here.ranks[0], here.group_loops[0]
    rank.match()
    rank.post(Send(1), numbers(1), watched=True)
    rank.post(Recv(1), watched=True)
    wait_for(lambda: len(group_loop.pending_ops) == 2)
    if says_so:
        rank.doorbell.send(messages.encode_bare(messages.MessageType.LEAVE))
    rank.doorbell.close()
    here.report(ReportKind.LEFT if says_so else ReportKind.LOST)
    group_loop.apply_verdict(replace(here.verdict(Code.ABORTED), missing=(here.group.members[0],), orderly=says_so))
    assert here.ended.get(timeout=10) is group_loop


# Memory


@spread
def test_a_rank_that_receives_promptly_is_never_refused(
    world: Any, monkeypatch: pytest.MonkeyPatch, hosts: Any
) -> None:
    limit_unexpected(monkeypatch, 100_000)
    here = world(*hosts)
    sender, receiver = here.ranks
    receiver.match()
    count = 20
    for _ in range(count):
        sender.post(Send(1), numbers(20_000))
    for _ in range(count):
        told = receiver.delivered()
        assert np.array_equal(receiver.outlined(told)[0].ravel(), numbers(20_000))
        receiver.release(told.slot)
    assert here.reports.empty()


@spread
def test_of_many_small_messages_none_is_refused_whose_rank_releases_late(
    world: Any, monkeypatch: pytest.MonkeyPatch, hosts: Any
) -> None:
    limit_unexpected(monkeypatch, 10_000)
    here = world(*hosts)
    sender, receiver = here.ranks
    receiver.match()
    held: list[int] = []
    for number in itertools.count():
        sender.post(Send(1, number), numbers(100))
        sender.done()
        held.append(receiver.delivered().slot)
        if len(held) == 8:
            receiver.doorbell.send(messages.encode_release(tuple(held)))
            held.clear()
            if number > 200:
                break
    handed = here.group_loop_of(1)._generation.point_to_point._memory._handed_over
    assert len(handed) <= 64 + 2 * 8 and here.reports.empty()


@spread
def test_messages_that_a_rank_keeps_have_a_bound_and_their_sender_is_named(
    world: Any, monkeypatch: pytest.MonkeyPatch, hosts: Any
) -> None:
    monkeypatch.setattr(message_memory, "PATIENCE_SECONDS", 0.05)
    limit_unexpected(monkeypatch, 100_000)
    here = world(*hosts)
    sender, receiver = here.ranks
    receiver.match()
    for tag in range(2):
        sender.post(Send(1, tag), numbers(20_000))
    assert receiver.delivered().tag == 0
    report = here.report(ReportKind.UNCLAIMED)
    assert (report.rank, report.peer) == (1, 0) and "with tag 1" in report.text and "80" in report.text


@spread
def test_no_message_is_refused_for_what_a_rank_has_not_read_yet(
    world: Any, monkeypatch: pytest.MonkeyPatch, hosts: Any
) -> None:
    monkeypatch.setattr(message_memory, "PATIENCE_SECONDS", 0.01)
    limit_unexpected(monkeypatch, 100_000)
    here = world(*hosts)
    sender, receiver = here.ranks
    receiver.match()
    for _ in range(2):
        sender.post(Send(1), numbers(20_000))
    memory = here.group_loop_of(1)._generation.point_to_point._memory
    waits = set[float]()
    while len(waits) < 5:  # it is given another moment again and again
        waits.update(look_at for look_at, _ in memory._waiting.copy().values())
    monkeypatch.setattr(message_memory, "PATIENCE_SECONDS", 3600.0)
    wait_for(lambda: memory.next_deadline > max(waits) + 1000)
    receiver.release(receiver.delivered().slot)
    receiver.delivered()
    assert here.reports.empty()


@spread
def test_patience_with_a_rank_that_does_not_read_has_an_end(
    world: Any, monkeypatch: pytest.MonkeyPatch, hosts: Any
) -> None:
    monkeypatch.setattr(message_memory, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(message_memory, "MOST_PATIENCE_SECONDS", 0.05)
    limit_unexpected(monkeypatch, 100_000)
    here = world(*hosts)
    here.ranks[1].match()
    for _ in range(2):
        here.ranks[0].post(Send(1), numbers(20_000))
    assert here.report(ReportKind.UNCLAIMED).rank == 1


def test_a_message_that_waits_for_room_holds_up_none_between_other_ranks_of_its_worker(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_memory, "PATIENCE_SECONDS", 3600.0)
    limit_unexpected(monkeypatch, 100_000)
    here = world(3)
    first, second, third = here.ranks
    second.match()
    third.match()
    for _ in range(2):
        first.post(Send(1), numbers(20_000))
    wait_for(lambda: here.group_loops[0]._generation.point_to_point._memory.is_awaited)
    second.post(Send(2, 4), numbers(10))
    assert third.delivered().tag == 4


def test_a_rank_says_that_it_has_no_room_for_what_comes_over_a_link(world: Any) -> None:
    here = world(1, 1)
    receiver, generation = here.ranks[1], here.group.generation
    receiver.match()
    for told in (
        Unclaimed(generation + 1, 0, 5, 100, 7),
        Unclaimed(generation, 2, 5, 100, 7),  # there is no such rank
        Unclaimed(generation, 0, 6, 100, 7),
    ):
        receiver.doorbell.send(told.encode())
    report = here.report(ReportKind.UNCLAIMED)
    assert (report.rank, report.peer) == (1, 0)
    assert report.text.endswith("100 bytes with tag 6: 7 bytes wait to be received already")


@spread
def test_a_message_that_waits_for_room_is_forgotten_with_its_generation(
    world: Any, monkeypatch: pytest.MonkeyPatch, hosts: Any
) -> None:
    monkeypatch.setattr(message_memory, "PATIENCE_SECONDS", 3600.0)
    limit_unexpected(monkeypatch, 100_000)
    here = world(*hosts)
    sender, receiver = here.ranks
    receiver.match()
    for _ in range(2):
        sender.post(Send(1), numbers(20_000))
    memory = here.group_loop_of(1)._generation.point_to_point._memory
    wait_for(lambda: memory.is_awaited)
    here.rule(here.verdict(Code.DEADLINE_EXCEEDED))
    receiver.delivered()
    if hosts == (2,):  # elsewhere the system of the other host has taken it
        assert not sender.done().has_result
        assert sender.failed()[1].code == Code.DEADLINE_EXCEEDED
        wait_for(lambda: not memory.is_awaited)
    here.group_loop_of(1).stop()
    here.group_loop_of(1).join()
    assert not memory.is_awaited and memory.next_deadline == float("inf")


def test_a_message_beyond_the_bound_comes_where_its_rank_keeps_no_other(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_unexpected(monkeypatch, 1000)
    here = world(1, 1)
    here.ranks[1].match()
    for _ in range(3):
        here.ranks[0].post(Send(1), numbers(2000))
        told = here.ranks[1].delivered()
        here.ranks[1].release(told.slot)
    assert here.reports.empty()
