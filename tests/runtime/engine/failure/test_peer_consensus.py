"""Without a coordinator: the workers of a generation come to one verdict."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.waiting import settle

from collectived.calls.timeout import DEADLINE_GRACE, GRACE_STEPS
from collectived_proto.deadline import Patience
from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.types import Member, Recv, ReportKind, Send, Verdict
from collectived_runtime.engine.failure import peer_consensus, reporter
from collectived_runtime.engine.failure.verdict_agreement import LISTEN_STEPS, precedence
from collectived_runtime.transport.link import LinkBroken


@pytest.mark.parametrize("late", [0.0, 0.004, 0.02, 0.1])
def test_who_decides_alone_does_so_before_clients_that_hear_nothing_give_up(late: float) -> None:
    """However late all of them wake, and the client of who was told it last hears of it too."""
    now = late  # after the deadline, which a worker sees then
    waits = [
        (reporter.DECIDE_ALONE_SECONDS, reporter.DECIDE_ALONE_STEPS),
        (peer_consensus.LISTEN_SECONDS, LISTEN_STEPS),
    ]
    for seconds, steps in waits:
        now = find_end(Patience(seconds, now, steps), late)
    assert now + late + 0.025 <= find_end(Patience(DEADLINE_GRACE, 0.0, GRACE_STEPS), late)


def find_end(patience: Patience, late: float) -> float:
    """When a wait is over for who wakes so late from each step."""
    now = patience.at + late
    while not patience.is_over(now):
        now = patience.at + late
    return now


@pytest.mark.parametrize("hosts", [(1, 1, 1), (2, 1, 2), (1, 3)], ids=str)
def test_all_hear_the_same_verdict_which_names_the_missing_rank(
    world: Any, monkeypatch: pytest.MonkeyPatch, hosts: Any
) -> None:
    monkeypatch.setattr(peer_consensus, "LISTEN_SECONDS", 1.0)  # for as long as a busy machine may need
    here = world(*hosts)
    *present, absent = here.ranks
    for rank in present:
        rank.submit(remaining=0.5)  # in which all of them are there, however busy the machine is
    heard = [rank.failed() for rank in present]
    absent.submit()
    heard.append(absent.failed())
    verdicts = [verdict for _, verdict in heard]
    assert {verdict.message for verdict in verdicts} == {verdicts[0].message}
    assert {verdict.decided_by for verdict in verdicts} == {verdicts[0].decided_by} != {"coordinator"}
    assert all(verdict.code == Code.DEADLINE_EXCEEDED for verdict in verdicts)
    assert all([member.rank for member in verdict.missing] == [absent.rank] for verdict in verdicts)


def test_a_lost_peer_is_named_alike_by_all_that_are_left(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_consensus, "LISTEN_SECONDS", 1.0)
    here = world(1, 1, 1, 1)
    *present, last = here.ranks
    for rank in present:
        rank.submit()
    here.group_loop_of(last.rank).stop()
    last.doorbell.close()
    for group_loop in here.group_loops[:-1]:
        group_loop._poller.call_soon_threadsafe(
            lambda group_loop=group_loop: group_loop._generation.on_link_broken(LinkBroken("cut", 3))
        )
    verdicts = [rank.failed()[1] for rank in present]
    assert len({verdict.message for verdict in verdicts}) == 1
    assert all(verdict.code == Code.UNAVAILABLE and verdict.missing[0].rank == 3 for verdict in verdicts)


def test_what_the_coordinator_has_said_goes_before_what_a_worker_decides(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_consensus, "LISTEN_SECONDS", 1.0)  # an answer takes longer on a busy machine
    here = world(1, 1)
    said = here.verdict(Code.ABORTED, message="the coordinator's word")
    here.group_loops[1].apply_verdict(said)  # the other one does not hear of it
    here.ranks[0].submit(remaining=0.05)
    assert here.ranks[0].failed()[1].message == "the coordinator's word"


def test_a_verdict_of_the_coordinator_amid_a_flood_reaches_those_whom_it_was_not_sent(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_consensus, "LISTEN_SECONDS", 3.0)  # of which a sixth must do for the coordinator
    here = world(1, 1, 1)
    present, absent, last = here.ranks
    go_on = threading.Event()  # the third worker says nothing until then, and the others listen for it
    here.group_loop_of(last.rank)._poller.call_soon_threadsafe(lambda: go_on.wait(30.0))
    present.submit(remaining=0.05)
    flooded = here.group_loop_of(absent.rank)._generation.peer_consensus
    settle(lambda: flooded.next_deadline() < math.inf and not flooded.idle)
    here.group_loops[0].apply_verdict(here.verdict(Code.DEADLINE_EXCEEDED, message="the coordinator's word"))
    absent.submit()
    assert [rank.failed()[1].message for rank in (present, absent)] == ["the coordinator's word"] * 2
    go_on.set()
    last.submit()
    assert last.failed()[1].message == "the coordinator's word"


def test_of_several_verdicts_the_lowest_instance_and_rank_counts(world: Any) -> None:
    here = world(1)
    verdict = replace(here.verdict(Code.UNAVAILABLE), decided_by="a")

    def about(instance: int, *ranks: int) -> Any:
        members = tuple(Member(rank, "", 0, "", 0) for rank in ranks)
        return replace(verdict, from_instance=instance, missing=members)

    ordered = [about(1, 7), about(2, 0, 3), about(2, 1), about(2)]
    assert sorted(reversed(ordered), key=precedence) == ordered
    by_coordinator = replace(verdict, decided_by="coordinator", from_instance=2)
    assert precedence(ordered[0]) < precedence(by_coordinator) < precedence(ordered[1])


@pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
def test_without_a_coordinator_a_lost_rank_ends_what_comes_later(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    here.ranks[1].doorbell.close()
    assert here.report(ReportKind.LOST).rank == 1
    here.ranks[0].submit()
    code = here.ranks[0].failed()[1].code
    assert code == Code.UNAVAILABLE


@pytest.mark.parametrize("hosts", [(2,), (1, 1)], ids=str)
def test_without_a_coordinator_a_lost_sender_ends_a_recv(world: Any, hosts: Any) -> None:
    here = world(*hosts)
    number = here.ranks[0].post(Recv(1))
    here.ranks[1].doorbell.close()
    failed, verdict = here.ranks[0].failed()
    assert (failed, verdict.code) == (number, Code.UNAVAILABLE)


def test_without_a_coordinator_a_peer_that_has_left_is_not_waited_for(world: Any) -> None:
    here = world(1, 1, connected=False)
    for rank in here.ranks:
        rank.submit()
    for rank in here.ranks:
        rank.done()
    here.ranks[0].submit()
    leave(here.ranks[1])
    assert left(here.ranks[0].failed()[1]) == [1]


def leave(rank: Any) -> None:
    rank.doorbell.send(messages.encode_bare(messages.MessageType.LEAVE))
    rank.doorbell.close()


def left(verdict: Verdict) -> list[int]:
    """Who has left in order, as a worker says alone."""
    assert (verdict.code, verdict.orderly) == (Code.ABORTED, True) and "left the group" in verdict.message
    assert verdict.decided_by.startswith("worker ")
    return [member.rank for member in verdict.missing]


@pytest.mark.parametrize("waits", [True, False], ids=["who waits came before", "and after"])
def test_without_a_coordinator_a_rank_that_left_the_same_worker_is_not_waited_for(world: Any, waits: bool) -> None:
    here = world(2, connected=False)
    for rank in here.ranks:
        rank.submit()
    for rank in here.ranks:
        rank.done()
    if waits:
        here.ranks[0].submit()
    leave(here.ranks[1])
    if not waits:
        assert here.report(ReportKind.LEFT).rank == 1
        here.ranks[0].submit()
    instance, verdict = here.ranks[0].failed()
    assert (instance, left(verdict), verdict.from_instance) == (1, [1], 1)


def test_without_a_coordinator_what_a_rank_submitted_before_it_left_completes(world: Any) -> None:
    here = world(2, connected=False)
    here.ranks[1].submit()
    leave(here.ranks[1])
    assert here.report(ReportKind.LEFT).instance == 0
    here.ranks[0].submit()
    here.ranks[0].done()
    here.ranks[0].submit()
    assert left(here.ranks[0].failed()[1]) == [1]


def test_without_a_coordinator_a_worker_says_which_of_its_ranks_has_left_while_others_stay(world: Any) -> None:
    here = world(1, 2, connected=False)
    here.ranks[0].submit()
    leave(here.ranks[2])
    _, verdict = here.ranks[0].failed()
    assert (left(verdict), verdict.decided_by) == ([2], "worker 1")
    here.ranks[1].submit()
    assert here.ranks[1].failed()[1].message == verdict.message


@pytest.mark.parametrize("waiting", [0, 1])
def test_without_a_coordinator_who_left_before_anything_was_said_between_workers_is_not_waited_for(
    world: Any, waiting: int
) -> None:
    here = world(1, 1, connected=False)
    leave(here.ranks[1 - waiting])
    here.ranks[waiting].submit()
    assert left(here.ranks[waiting].failed()[1]) == [1 - waiting]


def test_where_the_coordinator_is_there_a_group_loop_that_all_have_left_ends_without_deciding_anything(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "DECIDE_ALONE_SECONDS", 60.0)
    here = world(1, 1)
    leave(here.ranks[1])
    assert here.ended.get(timeout=10) is here.group_loops[1]


@pytest.mark.parametrize("hosts", [(3,), (1, 1, 1), (1, 2), (2, 1)], ids=str)
def test_without_a_coordinator_recvs_from_ranks_that_left_fail_and_others_go_on(world: Any, hosts: Any) -> None:
    here = world(*hosts, connected=False)
    first, second, third = here.ranks
    for _ in range(3):
        for rank in here.ranks:
            rank.submit()
        for rank in here.ranks:
            rank.done()
    third.submit()
    leave(third)
    assert here.report(ReportKind.LEFT).rank == 2
    asked = first.post(Recv(2))
    failed, verdict = first.failed()
    assert (failed, left(verdict)) == (asked, [2])
    second.post(Send(0), np.arange(3, dtype=np.float32))
    second.done()
    leave(second)
    first.post(Recv(1))
    assert first.outlined(first.done())[0].ravel().tolist() == [0, 1, 2]
    asked = first.post(Recv(1))
    failed, verdict = first.failed()
    assert (failed, left(verdict)) == (asked, [1])


@pytest.mark.parametrize("mail", ["to it", "from it"])
def test_with_a_silent_coordinator_sends_and_recvs_fail_when_a_worker_with_which_they_had_mail_has_parted(
    world: Any, mail: str
) -> None:
    here = world(1, 1, lost_after=0.5)  # with a coordinator that is there, and silent
    stays, goes = here.ranks
    sender, receiver = (stays, goes) if mail == "to it" else (goes, stays)
    sender.post(Send(receiver.rank), np.arange(3, dtype=np.float32))
    sender.done()
    receiver.post(Recv(sender.rank))
    receiver.done()
    leave(goes)
    assert here.ended.get(timeout=10) is here.group_loops[1]
    asked = stays.post(Recv(1))
    failed, verdict = stays.failed()
    assert (failed, left(verdict)) == (asked, [1])
    number = stays.post(Send(1), np.arange(3, dtype=np.float32))
    assert stays.failed()[0] == number


def test_a_fault_after_a_departure_in_order_reaches_those_that_wait(world: Any) -> None:
    here = world(3)
    gone = replace(here.verdict(Code.ABORTED), missing=(here.group.members[2],), orderly=True)
    here.rule(gone)
    number = here.ranks[0].post(Recv(1))
    here.ranks[1].doorbell.close()  # the coordinator says nothing about it
    failed, verdict = here.ranks[0].failed()
    assert (failed, verdict.code) == (number, Code.UNAVAILABLE)


def test_a_worker_that_the_coordinator_gave_up_hears_of_it_from_the_others(world: Any) -> None:
    here = world(1, 1, 1)
    for rank in here.ranks:
        if rank.rank:
            rank.submit()
    lost = replace(here.verdict(Code.UNAVAILABLE, message="worker 2 is lost"), missing=(here.group.members[2],))
    for group_loop in here.group_loops[:2]:
        group_loop.apply_verdict(lost)
    assert [here.ranks[rank].failed()[1].message for rank in (1, 2)] == ["worker 2 is lost"] * 2


@pytest.mark.parametrize("posts", [False, True])
def test_with_a_silent_coordinator_an_instance_after_letters_hears_too_that_a_worker_has_parted(
    world: Any, posts: bool
) -> None:
    here = world(1, 1, lost_after=0.5)
    stays, goes = here.ranks
    for rank in here.ranks:
        rank.submit()
    for rank in here.ranks:
        rank.done()
    goes.post(Send(0), np.arange(3, dtype=np.float32))
    goes.done()
    stays.post(Recv(1))
    stays.done()
    leave(goes)
    assert here.ended.get(timeout=10) is here.group_loops[1]
    if posts:
        asked = stays.post(Recv(1))
        assert stays.failed()[0] == asked
    stays.submit()
    assert left(stays.failed()[1]) == [1]


def test_a_departure_that_a_worker_decides_alone_does_not_outrun_what_the_coordinator_has_said(world: Any) -> None:
    here = world(1, 1, connected=False)
    here.group_loops[1].apply_verdict(
        here.verdict(Code.ABORTED, message="the coordinator's word")
    )  # the other one has not heard it
    here.ranks[0].submit()
    group_loop = here.group_loops[0]
    group_loop._poller.call_soon_threadsafe(lambda: group_loop._generation.reporter.report_worker_left(1, 0))
    assert here.ranks[0].failed()[1].message == "the coordinator's word"
