"""How much a rank may have described: the oldest is forgotten, by count and by bytes."""

from __future__ import annotations

import numpy as np
import pytest

from collectived_proto.errors import InvalidArgumentError
from collectived_proto.types import AllReduce, Collective, DType, GroupInfo, Layout, Leaf, Member, Peer, ReduceOp, Tier
from collectived_proto.v1 import common_pb2
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.compile.negotiation import prepare
from collectived_runtime.engine.submit.contracts import PreparedCollective
from collectived_runtime.worker import prepared
from collectived_runtime.worker.prepared import check_leaves, check_name, register_prepared

MADE = PreparedCollective(Collective(AllReduce(ReduceOp.SUM), "*", ()), b"", Layout((), (), 0, 0), "all_reduce(sum)")


def local_rank() -> LocalRank:
    return LocalRank(0, Member(0, "CPU:0", 0, "here", 1), lambda *_: np.zeros(0, np.uint8), -1)


def test_the_oldest_descriptions_are_forgotten_when_all_take_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MAX_DESCRIPTION_BYTES", 100)
    one = local_rank()
    numbers = [register_prepared(one, MADE, 40) for _ in range(5)]
    assert list(one.prepared) == list(one.prepared_sizes) == numbers[-2:] and one.prepared_bytes == 80
    assert list(one.prepared) == [*numbers[-2:]] and register_prepared(one, MADE, 100) in one.prepared
    assert len(one.prepared) == 1 and one.prepared_bytes == 100


def test_the_oldest_descriptions_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MAX_PREPARED", 3)
    one = local_rank()
    numbers = [register_prepared(one, MADE, 1) for _ in range(5)]
    assert list(one.prepared) == numbers[-3:] and one.prepared_bytes == 3


def test_descriptions_are_let_go_when_nothing_can_be_submitted_any_more() -> None:
    one = local_rank()
    register_prepared(one, MADE, 40)
    one.forget_prepared()
    assert not one.prepared and not one.prepared_sizes and one.prepared_bytes == 0


def test_a_value_of_more_bytes_than_a_layout_can_say_is_refused() -> None:
    halves = tuple(Leaf(f"[{half}]", DType.INT8, (1 << 62,)) for half in range(2))
    member = Member(0, "/job:worker/replica:0/task:0/device:CPU:0", 0, "here", 1)
    topology = GroupTopology(
        GroupInfo("world", 1, 2, (member,)), (Peer(0, "a", "here", "127.0.0.1:1", (0,)),), 0, (Tier("ring"),)
    )
    with pytest.raises(InvalidArgumentError, match=f"a value of {1 << 63} bytes"):
        prepare(Collective(AllReduce(ReduceOp.SUM), "[*, *]", halves), 0, topology)
    means = (Leaf("", DType.INT8, (1 << 61,)),)
    with pytest.raises(InvalidArgumentError, match=f"a result of {1 << 63} bytes"):
        prepare(Collective(AllReduce(ReduceOp.MEAN), "*", means), 0, topology)


def test_a_description_that_alone_takes_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MAX_DESCRIPTION_BYTES", 100)
    with pytest.raises(InvalidArgumentError, match="bytes to describe"):
        check_leaves(common_pb2.Collective(site="x" * 200))


@pytest.mark.parametrize("name", ["a\nOK", "\x1b[2J", "train\u202e", "n" * 257])
def test_a_name_that_could_forge_a_line_or_is_too_long_is_refused(name: str) -> None:
    check_name("the name of a group", "train (äöü) 1")
    with pytest.raises(InvalidArgumentError, match="^the name of a group (must have no control characters|has 257)"):
        check_name("the name of a group", name)
