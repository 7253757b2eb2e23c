"""What simulated workers say, and how they take what they hear."""

from __future__ import annotations

import pytest
from benchmarks.load import messages

from collectived_proto.group_codec import formed_to_bytes
from collectived_proto.types import GroupInfo, Member
from collectived_proto.v1 import coordinator_pb2 as pb


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (pb.CoordinatorMessage(welcome=pb.Welcome(epoch=3)), "welcome"),
        (pb.CoordinatorMessage(join_done=pb.JoinDone(request="x")), "join_done"),
        (pb.CoordinatorMessage(verdict={"group": "world"}), "verdict"),
        (pb.CoordinatorMessage(newcomers=pb.Newcomers(waiting=1)), "newcomers"),
        (pb.CoordinatorMessage(), ""),
    ],
)
def test_a_message_is_known_by_its_first_bytes(message: pb.CoordinatorMessage, kind: str) -> None:
    assert messages.kind(message.SerializeToString()) == kind


def test_every_worker_has_names_of_its_own() -> None:
    one, other = (pb.WorkerMessage.FromString(messages.hello(task)).hello for task in (1, 2))
    assert one.task != other.task
    assert one.incarnation != other.incarnation
    assert one.link_address != other.link_address


def test_a_join_is_for_the_worker_s_own_device() -> None:
    ask = pb.WorkerMessage.FromString(messages.ask(7, 4096)).join
    assert ask.device == "/job:worker/replica:0/task:7/device:CPU:0"
    assert ask.min_size == ask.max_size == 4096


def test_a_position_answers_its_query() -> None:
    query = pb.Query(key=1, generation=2, instance=3, query=4)
    answer = pb.WorkerMessage.FromString(messages.position(query, 9)).position
    assert (answer.key, answer.generation, answer.instance, answer.query) == (1, 2, 3, 4)
    assert [rank.rank for rank in answer.ranks] == [9]


def test_a_loss_is_reported_for_the_rank_and_generation_that_were_joined() -> None:
    member = Member(3, "/job:worker/replica:0/task:3/device:CPU:0", 3, "host", 1)
    formed = formed_to_bytes(GroupInfo("load/world", 5, 6, (member,)), (), (), False)
    report = pb.WorkerMessage.FromString(messages.lost(pb.JoinDone(rank=3, formed=formed))).report
    assert (report.key, report.generation, report.rank, report.kind) == (5, 6, 3, pb.Report.LOST)
