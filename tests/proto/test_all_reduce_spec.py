"""What an all_reduce_spec may look like, and which tier takes which tensor."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from collectived_proto.all_reduce_spec import ALGORITHMS, parse_all_reduce_spec
from collectived_proto.types import Tier, select_tier


class AllReduceSpecTuple(NamedTuple):
    alg: str
    shards: int
    limit: int


def test_a_string_is_one_shard_without_limit() -> None:
    assert parse_all_reduce_spec("nccl/xring") == (Tier("nccl/xring", 1, -1),)


@pytest.mark.parametrize("spec", (("xring",), ("xring", 1), ("xring", 1, -1), AllReduceSpecTuple("xring", 1, -1)))
def test_a_tuple_may_leave_out_shards_and_limit(spec: object) -> None:
    assert parse_all_reduce_spec(spec) == (Tier("xring", 1, -1),)


def test_numbers_of_numpy_are_numbers() -> None:
    spec = [("xring", np.int64(2), np.uint16(10)), ("xring",)]
    found = parse_all_reduce_spec(spec)
    assert found == (Tier("xring", 2, 10), Tier("xring"))
    assert type(found[0].shards) is int and type(found[0].limit) is int


def test_a_list_is_tiers_in_order_of_size() -> None:
    spec = [("pscpu", 2, 1024), AllReduceSpecTuple("nccl/rechd", 1, 4096), ("xring",)]
    assert parse_all_reduce_spec(spec) == (Tier("pscpu", 2, 1024), Tier("nccl/rechd", 1, 4096), Tier("xring"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_of_the_seeds_is_known(name: str) -> None:
    assert parse_all_reduce_spec(name)[0].algorithm == name


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    (
        (None, ValueError, "must be a string, a tuple or a list"),
        (7, ValueError, "must be a string, a tuple or a list"),
        ("ring", ValueError, r"all_reduce_spec = .*unknown algorithm 'ring'"),
        ((), ValueError, "one to three entries"),
        (("xring", 1, -1, 0), ValueError, "one to three entries"),
        ([], ValueError, "is empty"),
        (["xring"], ValueError, r"all_reduce_spec\[0\] must be a tuple"),
        ([("xring", 1, 10), ("what",)], ValueError, r"all_reduce_spec\[1\].*unknown algorithm 'what'"),
        (("xring", 0), ValueError, "shards must be at least 1, got 0"),
        (("xring", "2"), ValueError, "shards must be an int"),
        (("xring", True), ValueError, "shards must be an int"),
        (("xring", 1, 2.5), ValueError, "limit must be an int"),
        (("xring", 1, -2), ValueError, "limit must be bytes, or -1"),
        (("xring", 1 << 33), ValueError, "shards must be at most 4096, got 8589934592"),
        ([("xring", 1, 1 << 64), ("xring",)], ValueError, r"spec\[0\] = .*: limit must be at most 9223372036854775807"),
        (("xring", np.float32(2)), ValueError, "shards must be an int"),
        (("xring", 1, 100), ValueError, "the last limit, and no other, must be -1"),
        ([("xring", 1, 10), ("pscpu", 1, 20)], ValueError, r"all_reduce_spec\[1\]: the last limit"),
        ([("xring",), ("pscpu",)], ValueError, r"all_reduce_spec\[0\]: the last limit, and no other"),
        ([("xring", 1, 10), ("xring", 1, 10), ("xring",)], ValueError, r"\[1\]: limits must increase, got 10 after 10"),
        ([("xring", 1, 10), ("xring", 1, 9), ("xring",)], ValueError, r"\[1\]: limits must increase, got 9 after 10"),
    ),
)
def test_what_is_wrong_is_an_error_that_names_the_entry(spec: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        parse_all_reduce_spec(spec)


def test_limits_are_bytes_and_inclusive() -> None:
    tiers = parse_all_reduce_spec([("pscpu", 1, 0), ("xring", 1, 100), ("nccl",)])
    found = [tiers.index(select_tier(tiers, nbytes)) for nbytes in (0, 1, 100, 101, 1 << 40)]
    assert found == [0, 1, 1, 2, 2]
