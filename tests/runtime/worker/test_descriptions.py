"""How much a rank may have described: the oldest is forgotten, by count and by bytes."""

from __future__ import annotations

import numpy as np
import pytest

from collectived_proto.errors import InvalidArgumentError
from collectived_proto.types import AllReduce, Collective, Layout, Member, ReduceOp
from collectived_proto.v1 import common_pb2
from collectived_runtime.engine.ledger import Prepared
from collectived_runtime.engine.seat import Seat
from collectived_runtime.worker import descriptions
from collectived_runtime.worker.descriptions import check_leaves, keep

MADE = Prepared(Collective(AllReduce(ReduceOp.SUM), "*", ()), b"", Layout((), (), 0, 0), "all_reduce(sum)")


def seat() -> Seat:
    return Seat(0, Member(0, "CPU:0", 0, "here", 1), lambda *_: np.zeros(0, np.uint8), -1)


def test_the_oldest_descriptions_are_forgotten_when_all_take_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptions, "MAX_DESCRIBED", 100)
    one = seat()
    numbers = [keep(one, MADE, 40) for _ in range(5)]
    assert list(one.prepared) == list(one.sizes) == numbers[-2:] and one.described == 80
    assert list(one.prepared) == [*numbers[-2:]] and keep(one, MADE, 100) in one.prepared
    assert len(one.prepared) == 1 and one.described == 100


def test_the_oldest_descriptions_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptions, "MAX_PREPARED", 3)
    one = seat()
    numbers = [keep(one, MADE, 1) for _ in range(5)]
    assert list(one.prepared) == numbers[-3:] and one.described == 3


def test_a_description_that_alone_takes_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptions, "MAX_DESCRIBED", 100)
    with pytest.raises(InvalidArgumentError, match="bytes to describe"):
        check_leaves(common_pb2.Collective(site="x" * 200))
