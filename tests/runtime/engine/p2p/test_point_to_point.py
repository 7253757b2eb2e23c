"""Sends and recvs between two ranks, on one worker and on two."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.runtime.engine.conftest import wait_for

from collectived_proto.codec import collective_from_proto
from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.types import ANY_SOURCE, AllReduce, Recv, ReduceOp, ReportKind, Send
from collectived_proto.v1 import common_pb2
from collectived_runtime.engine.base import arenas
from collectived_runtime.engine.p2p import descriptions, pending_ops, point_to_point
from collectived_runtime.engine.run import streams
from collectived_runtime.transport.link import LinkBroken

spread = pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)


def numbers(count: int, first: float = 0.0) -> Any:
    return first + np.arange(count, dtype=np.float32)


@spread
def test_a_letter_arrives_whoever_comes_first(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    first, second = here.ranks
    number = first.post(Send(1, 5), numbers(7))
    assert first.done() == messages.Completion(number, 0, True, False)
    asked = second.post(Recv(0, 5))
    done = second.done()
    assert (done.instance, done.is_last, done.has_result) == (asked, True, True)
    assert second.outlined(done)[0].ravel().tolist() == numbers(7).tolist()
    asked = first.post(Recv(1, 0))
    second.post(Send(0, 0), numbers(3, 9.0))
    second.done()
    done = first.done()
    assert done.instance == asked and first.outlined(done)[0].ravel().tolist() == [9, 10, 11]


def test_a_letter_waits_for_a_rank_whose_join_is_not_through(world: Any) -> None:
    here = world(1, 1, late=(1,))
    here.ranks[0].post(Send(1), numbers(100))
    here.ranks[0].done()
    wait_for(lambda: here.group_loops[1].traffic()[1] >= 400)
    receiver = here.add(1)
    receiver.post(Recv(0))
    assert len(receiver.outlined(receiver.done())[0]) == 100


@spread
def test_a_letter_tells_its_structure_types_and_shapes(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    here.ranks[0].post(Send(1), np.zeros((3, 0, 2), np.int16))
    here.ranks[1].post(Recv(0))
    _, outline = here.ranks[1].outline(here.ranks[1].done())
    told = collective_from_proto(common_pb2.Collective.FromString(outline.description))
    assert (told.structure, told.leaves[0].shape, told.leaves[0].dtype.label) == ("*", (3, 0, 2), "int16")


@spread
def test_two_ranks_that_both_send_first_both_receive(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    values = [numbers(200_000, 1000.0 * rank.rank) for rank in here.ranks]
    for rank, value in zip(here.ranks, values, strict=True):
        rank.post(Send(1 - rank.rank), value)
    for rank in here.ranks:
        assert not rank.done().has_result
    for rank in here.ranks:
        rank.post(Recv(1 - rank.rank))
        assert np.array_equal(rank.outlined(rank.done())[0].ravel(), values[1 - rank.rank])


@spread
def test_letters_of_one_tag_keep_their_order_and_tags_do_not_mix(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    sender, receiver = here.ranks
    for count in (3, 50_000, 0, 2):
        sender.post(Send(1, 7), numbers(count))
        sender.post(Send(1, 8), numbers(count + 1))
    for _ in range(8):
        sender.done()
    for tag, more in ((8, 1), (7, 0)):
        for count in (3, 50_000, 0, 2):
            receiver.post(Recv(0, tag))
            assert len(receiver.outlined(receiver.done())[0]) == count + more


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2048, 4096])
def test_letters_of_every_size_arrive_whole(world: Any, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(streams, "STEP_BYTES", 4096)  # of which some of these are multiples
    here = world(1, 1)
    here.ranks[0].post(Send(1), numbers(count))
    here.ranks[1].post(Recv(0))
    assert np.array_equal(here.ranks[1].outlined(here.ranks[1].done())[0].ravel(), numbers(count))


def test_few_and_only_short_descriptions_of_sends_are_kept(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(1, 1)
    kept = here.group_loops[0]._generation.point_to_point._descriptions._known

    def send(count: int) -> None:
        here.ranks[0].post(Send(1), numbers(count))
        here.ranks[0].done()

    for count in range(1, 2 * descriptions.MAX_DESCRIPTIONS):
        send(count)
        assert 0 < len(kept) <= descriptions.MAX_DESCRIPTIONS
    kept.clear()
    monkeypatch.setattr(descriptions, "SHORT_BYTES", 1)
    send(1000)
    assert not kept


@spread
def test_a_rank_may_send_to_itself(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    rank = here.ranks[1]
    rank.post(Send(1), numbers(4))
    rank.done()
    rank.post(Recv(1))
    assert rank.outlined(rank.done())[0].ravel().tolist() == [0, 1, 2, 3]


@spread
def test_posts_do_not_count_as_instances_and_do_not_wait_for_them(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    first, second = here.ranks
    first.submit(np.ones(4, np.float32), operation=AllReduce(ReduceOp.SUM))  # waits for the other rank
    second.post(Send(0), numbers(2))
    assert not second.done().has_result
    first.post(Recv(1))
    assert first.outlined(first.done())[0].ravel().tolist() == [0, 1]
    second.submit(np.ones(4, np.float32), operation=AllReduce(ReduceOp.SUM))
    for rank in here.ranks:
        assert rank.result(rank.done()).tolist() == [2] * 4


@spread
@pytest.mark.parametrize("source", [0, ANY_SOURCE])
def test_a_recv_whose_letter_does_not_come_in_time_ends_alone_and_the_letter_is_for_the_next(
    world: Any, hosts: Any, source: int
) -> None:
    here = world(*hosts)
    sender, receiver = here.ranks
    number = receiver.post(Recv(source, 3), remaining=0.05)
    generation = here.group.generation
    assert receiver.withdrawn() == messages.Withdrawal(generation, number, Code.DEADLINE_EXCEEDED)
    sender.post(Send(1, 3), numbers(4))
    sender.done()
    receiver.post(Recv(source, 3))
    assert receiver.outlined(receiver.done())[0].ravel().tolist() == [0, 1, 2, 3]
    assert here.reports.empty()


@spread
def test_a_recv_from_any_rank_takes_what_came_first_and_says_who_sent_it(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    sender, receiver = here.ranks
    asked = receiver.post(Recv(ANY_SOURCE))
    sender.post(Send(1), numbers(3))
    sender.done()
    done = receiver.done()
    assert (done.instance, done.source, done.has_result) == (asked, 0, True)
    receiver.post(Send(1), numbers(5))  # to itself
    receiver.done()
    receiver.post(Recv(ANY_SOURCE))
    done = receiver.done()
    assert done.source == 1 and len(receiver.outlined(done)[0]) == 5


@spread
def test_receives_that_compete_for_a_letter_are_served_as_they_were_posted(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    sender, receiver = here.ranks
    asked = [receiver.post(Recv(source)) for source in (ANY_SOURCE, 0, ANY_SOURCE, 0)]
    for count in range(4):
        sender.post(Send(1), numbers(count))
    found = [receiver.done() for _ in range(4)]
    assert [done.instance for done in found] == asked
    assert [len(receiver.outlined(done)[0]) for done in found] == [0, 1, 2, 3]


@spread
def test_a_cancelled_recv_takes_nothing_and_the_next_letter_is_for_the_next_recv(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    sender, receiver = here.ranks
    first, second = receiver.post(Recv(ANY_SOURCE)), receiver.post(Recv(0))
    receiver.cancel(first)
    assert receiver.withdrawn() == messages.Withdrawal(here.group.generation, first, Code.CANCELLED)
    sender.post(Send(1), numbers(2))
    done = receiver.done()
    assert done.instance == second and done.source is None


@spread
def test_a_recv_that_is_cancelled_too_late_keeps_its_letter(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    sender, receiver = here.ranks
    sender.post(Send(1), numbers(2))
    sender.done()
    asked = receiver.post(Recv(0))
    done = receiver.done()
    receiver.cancel(asked)
    receiver.cancel(asked + 100)  # which was never posted
    receiver.post(Send(0), numbers(1))
    assert not receiver.done().has_result  # and hears nothing of the cancels
    assert done.instance == asked and len(receiver.outlined(done)[0]) == 2


def test_no_letter_is_lost_however_cancels_and_letters_meet(world: Any) -> None:
    here = world(1, 1)
    sender, receiver = here.ranks
    taken, sent = 0, 200
    for _ in range(sent):
        sender.post(Send(1), numbers(1, taken))
        asked = receiver.post(Recv(ANY_SOURCE))
        receiver.cancel(asked)
        heard = receiver.hear()
        taken += isinstance(heard, messages.Completion)
    for _ in range(sent - taken):
        receiver.post(Recv(0))
        assert receiver.done().has_result
    receiver.post(Recv(0), remaining=0.05)
    assert receiver.withdrawn().code == Code.DEADLINE_EXCEEDED  # there was no other


@spread
def test_a_recv_from_any_rank_ends_when_all_others_have_left(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    sender, receiver = here.ranks
    sender.post(Send(1, 1), numbers(2))
    sender.done()
    number = receiver.post(Recv(ANY_SOURCE))
    sender.doorbell.send(messages.encode_bare(messages.MessageType.LEAVE))
    here.report(ReportKind.LEFT)
    here.rule(replace(here.verdict(Code.ABORTED), orderly=True, missing=(here.group.members[0],)))
    failed, verdict = receiver.failed()
    assert (failed, verdict.code) == (number, Code.ABORTED)
    receiver.post(Recv(ANY_SOURCE, 1))
    assert receiver.done().source == 0  # what it had sent before is there


def test_a_recv_from_any_rank_goes_on_while_one_of_the_others_is_there(world: Any) -> None:
    here = world(2, 1)
    first, second, receiver = here.ranks
    number = receiver.post(Recv(ANY_SOURCE))
    first.doorbell.send(messages.encode_bare(messages.MessageType.LEAVE))
    here.report(ReportKind.LEFT)
    here.rule(replace(here.verdict(Code.ABORTED), orderly=True, missing=(here.group.members[0],)))
    second.post(Send(2), numbers(2))
    done = receiver.done()
    assert (done.instance, done.source) == (number, 1)


def test_a_send_that_is_not_taken_in_time_is_reported_with_both_ends(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(2)
    monkeypatch.setattr(point_to_point, "copy_in_stretches", without_end)
    here.ranks[1].post(Send(0, 3), numbers(5), remaining=0.05)
    report = here.report(ReportKind.OVERDUE)
    assert (report.rank, report.peer, report.text) == (1, 0, "send(to=0, tag=3) at test.py:1")


@spread
def test_a_letter_that_is_there_is_given_even_after_a_verdict(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    here.ranks[0].post(Send(1), numbers(3))
    here.ranks[0].done()
    here.ranks[1].post(Recv(0))
    here.ranks[1].done()
    here.ranks[0].post(Send(1), numbers(2))
    here.ranks[0].done()
    here.rule(here.verdict(Code.ABORTED, message="rank 0 left"))
    here.ranks[1].post(Recv(0))
    assert len(here.ranks[1].outlined(here.ranks[1].done())[0]) == 2
    number = here.ranks[1].post(Recv(0))
    assert here.ranks[1].failed()[0] == number


def test_a_post_out_of_turn_costs_its_rank_the_local_rank(world: Any) -> None:
    here = world(2)
    here.ranks[0].posted += 1
    here.ranks[0].post(Send(1), numbers(2))
    assert here.report(ReportKind.LOST).rank == 0


def test_more_than_the_allowed_posts_outstanding_are_that_clients_fault(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_P2P_OUTSTANDING", 3)
    here = world(2)
    first, second = here.ranks
    for tag in range(3):
        first.post(Recv(1, tag))
    second.post(Send(0, 1), numbers(1))
    assert first.done().instance == messages.P2P_BASE + 1, "three may be outstanding"
    first.post(Recv(1, 3))
    first.post(Recv(1, 4))
    report = here.report(ReportKind.LOST)
    assert report.rank == 0 and "submitted send or recv 4 with 3 outstanding" in report.text


def test_a_send_numbered_as_an_instance_is_malformed(world: Any) -> None:
    here = world(2)
    here.ranks[0].submit(numbers(2), operation=Send(1))
    assert "numbered as an instance" in here.report(ReportKind.LOST).text


@spread
def test_letters_of_a_rank_that_is_gone_still_arrive(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    here.ranks[0].post(Send(1), numbers(200_000))
    here.ranks[0].doorbell.close()
    here.ranks[1].post(Recv(0))
    assert len(here.ranks[1].outlined(here.ranks[1].done())[0]) == 200_000


@pytest.mark.parametrize("hosts", [(3,), (1, 2)], ids=str)
def test_what_nobody_asks_for_is_given_back_when_its_receiver_goes(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    sender, receiver, other = here.ranks
    for _ in range(3):
        sender.post(Send(1), numbers(100))
        sender.done()
    sender.post(Send(2), numbers(1))
    other.post(Recv(0))
    done = other.done()  # which came after the letters for rank 1
    receiver.doorbell.close()
    assert here.report(ReportKind.LOST).rank == 1
    sender.post(Send(1), numbers(100))  # for nobody
    sender.post(Send(2), numbers(1))
    other.post(Recv(0))
    last = other.done()
    assert set(here.group_loop_of(1)._results._slots) == {done.slot, last.slot}


def test_a_post_takes_no_part_in_a_generation_that_succeeds(world: Any) -> None:
    here = world(1, 1)
    first, second = here.ranks
    number = second.post(Recv(0))
    here.rule(here.verdict(Code.INVALID_ARGUMENT, successor=101))
    assert second.failed()[0] == number
    second.posted = messages.P2P_BASE
    number = second.post(Recv(0), generation=101)
    first.post(Send(1), numbers(3), generation=101)
    first.done()
    assert second.done().instance == number


@spread
def test_who_leaves_in_order_ends_only_what_waits_for_it(world: Any, hosts: Any) -> None:
    here = world(*hosts, 1)  # one rank more, on a worker of its own
    first, second, third = here.ranks
    number = first.post(Recv(1))
    first.post(Recv(2))
    gone = replace(here.verdict(Code.ABORTED), missing=(here.group.members[1],), orderly=True)
    here.rule(gone)
    assert first.failed()[0] == number
    third.post(Send(0), numbers(3))
    assert not third.done().has_result
    assert len(first.outlined(first.done())[0]) == 3
    number = first.post(Send(1), numbers(3))
    assert first.failed()[0] == number


def test_a_recv_that_waits_is_reported_before_its_deadline_and_again_later(world: Any) -> None:
    here = world(1, 1, stall_after=0.05)
    here.ranks[0].post(Recv(1))
    waited = [here.report(ReportKind.UNANSWERED).timeout_seconds for _ in range(3)]
    assert waited[0] >= 0.05 and waited[2] >= 2 * waited[1] - 0.01


def test_of_many_recvs_that_wait_for_one_peer_one_is_reported_at_a_time(world: Any) -> None:
    here = world(1, 1, stall_after=0.05)
    first, second = here.ranks
    began = time.monotonic()
    for _ in range(300):
        first.post(Recv(1))
    told = [here.report(ReportKind.UNANSWERED) for _ in range(2)]
    for _ in range(300):
        second.post(Send(0), numbers(1))
        second.done()
        done = first.done()
        first.doorbell.send(messages.encode_release((done.slot,)))
    while not here.reports.empty():
        told.append(here.reports.get())
    assert len(told) <= (time.monotonic() - began) / 0.05 + 1


def test_what_is_over_is_not_kept_until_it_would_have_stalled(world: Any) -> None:
    here = world(2)
    first, second = here.ranks
    for _ in range(300):
        first.post(Send(1), numbers(1))
        first.done()
        second.post(Recv(0))
        second.doorbell.send(messages.encode_release((second.done().slot,)))
    assert len(here.group_loops[0]._generation.point_to_point.ops._timers) < 100


@spread
def test_letters_that_nobody_asks_for_have_a_bound_and_their_sender_is_named(
    world: Any, monkeypatch: pytest.MonkeyPatch, hosts: Any
) -> None:
    here = world(*hosts)
    monkeypatch.setattr(arenas, "UNEXPECTED_MEMORY_DIVISOR", (1 << 30) // 100_000)  # of the worker's budget
    for _ in range(2):
        here.ranks[0].post(Send(1), numbers(20_000))
    report = here.report(ReportKind.UNCLAIMED)
    assert (report.rank, report.peer) == (1, 0) and "80" in report.text
    verdict = here.verdict(Code.RESOURCE_EXHAUSTED)
    here.rule(verdict)
    here.ranks[1].post(Recv(0))  # what is there is given all the same
    assert len(here.ranks[1].outlined(here.ranks[1].done())[0]) == 20_000


def test_a_letter_that_cannot_be_delivered_does_not_keep_its_group_loop_alive(world: Any) -> None:
    here = world(1, 1)
    group_loop = here.group_loops[0]
    exchange = here.group_loops[0]._worker.resources.link_provider

    def unreachable(call: Any) -> None:
        call.on_failure(LinkBroken("nobody listens there", call.hello.acceptor))

    exchange.dial = unreachable
    here.ranks[0].post(Send(1), numbers(1000))
    assert here.report(ReportKind.LINK).worker == 1
    group_loop.apply_verdict(here.verdict(Code.UNAVAILABLE))
    assert here.ranks[0].failed()[1].code == Code.UNAVAILABLE
    here.ranks[0].post(Send(1), numbers(1000))
    here.ranks[0].failed()
    here.ranks[0].doorbell.send(messages.encode_bare(messages.MessageType.LEAVE))
    here.ranks[0].doorbell.close()
    assert here.ended.get(timeout=10) is group_loop


def without_end(source: Any, target: Any) -> Any:
    while True:
        yield ()


def test_a_post_that_is_overdue_fails_at_once_when_that_is_decided(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_ops, "LAST_MESSAGES_SECONDS", 3600.0)
    monkeypatch.setattr(point_to_point, "copy_in_stretches", without_end)
    here = world(2)
    here.ranks[0].post(Send(1), numbers(5), remaining=0.02)
    number, verdict = here.ranks[0].failed()
    assert verdict.code == Code.DEADLINE_EXCEEDED and number >= messages.P2P_BASE


def test_a_send_that_has_failed_is_copied_no_further(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller may use its memory again, and a letter of both must not arrive."""
    monkeypatch.setattr(point_to_point, "copy_in_stretches", without_end)
    here = world(2)
    here.ranks[0].post(Send(1), numbers(1000))
    wait_for(lambda: here.group_loops[0].pending_ops)
    here.rule(here.verdict(Code.DEADLINE_EXCEEDED))
    assert here.ranks[0].failed()[1].code == Code.DEADLINE_EXCEEDED
    told: queue.Queue[bool] = queue.Queue()
    here.group_loops[0].query_positions(0, lambda *_: told.put(here.group_loops[0]._generation.point_to_point.idle))
    assert told.get(timeout=10)
