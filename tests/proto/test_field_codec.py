"""A codec reads and writes fields as the dataclass declares them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from collectived_proto.errors import InvalidArgumentError
from collectived_proto.field_codec import Codec
from collectived_proto.types import DType, RankPosition
from collectived_proto.v1 import common_pb2, coordinator_pb2, worker_pb2


@dataclass(frozen=True)
class Ask:
    task: int
    label: str
    rank: int | None = None
    last_instance: int = -1


def _refuse_rank_7(ask: Ask) -> None:
    if ask.rank == 7:
        raise InvalidArgumentError("rank 7")


ASK = Codec(Ask, coordinator_pb2.JoinAsk, given=1, renamed={"label": "device"}, check=_refuse_rank_7)


def test_fields_are_converted_both_ways_under_their_names_in_the_message() -> None:
    message = coordinator_pb2.JoinAsk(device="x", rank=0, last_instance=0)
    assert ASK.decode(message, 3) == Ask(3, "x", 0, 0)
    assert ASK.encode(Ask(3, "x", 0, 0)) == message


def test_a_field_that_is_not_set_has_the_default_of_the_dataclass_and_none_is_not_sent() -> None:
    assert ASK.decode(coordinator_pb2.JoinAsk(), 3) == Ask(3, "", None, -1)
    assert not ASK.encode(Ask(3, "")).HasField("rank")


def test_a_value_that_the_check_refuses_is_not_returned() -> None:
    with pytest.raises(InvalidArgumentError, match="rank 7"):
        ASK.decode(coordinator_pb2.JoinAsk(rank=7), 3)


def test_a_nested_value_that_is_not_set_is_not_decoded() -> None:
    codec = Codec(RankPosition, coordinator_pb2.RankPosition)
    assert codec.decode(coordinator_pb2.RankPosition(rank=2)).collective is None
    assert not codec.encode(RankPosition(2)).HasField("collective")


def test_an_enumerator_that_is_not_known_is_named_with_its_number() -> None:
    @dataclass
    class Typed:
        dtype: DType

    assert Codec(Typed, common_pb2.Leaf).decode(common_pb2.Leaf(dtype="INT8")).dtype is DType.INT8
    with pytest.raises(InvalidArgumentError, match="data type number 0 is not known"):
        Codec(Typed, common_pb2.Leaf).decode(common_pb2.Leaf())


def test_a_field_that_the_message_does_not_have_is_found_when_the_codec_is_made() -> None:
    with pytest.raises(KeyError, match="last_instance"):
        Codec(Ask, worker_pb2.AbortRequest, renamed={"task": "rank", "label": "reason"})
