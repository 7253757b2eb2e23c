"""Where two collectives differ is named as their user would name it."""

from __future__ import annotations

import pytest

from collectived_proto.types import AllReduce, Collective, DType, Leaf, ReduceOp
from collectived_runtime.verdicts.difference_text import (
    Difference,
    describe_collective,
    describe_paths,
    find_difference,
)

SUM = AllReduce(ReduceOp.SUM)


def value(structure: str, *leaves: tuple[str, DType, tuple[int, ...]]) -> Collective:
    return Collective(SUM, structure, tuple(Leaf(*leaf) for leaf in leaves))


F, INT, SCALAR = DType.FLOAT32, DType.INT64, ()


@pytest.mark.parametrize(
    "theirs, ours, expected",
    [
        (value("*", ("", F, (3,))), value("*", ("", F, (3,))), None),
        (value("*", ("", F, ())), value("*", ("", F, (1,))), Difference("the value", "float32[]", "float32[1]")),
        (
            value("{'a*': *}", ("['a*']", F, SCALAR)),
            value("{'a*': *}", ("['a*']", INT, SCALAR)),
            Difference("['a*']", "float32[]", "int64[]"),
        ),
        (
            value("{'a': *, 'b': *}", ("['a']", F, SCALAR), ("['b']", F, SCALAR)),
            value("{'a': *}", ("['a']", F, SCALAR)),
            Difference("['b']", "float32[]", "absent"),
        ),
        (
            value("{1: [[*], None]}", ("[1][0][0]", F, SCALAR)),
            value("{1: [[*], *]}", ("[1][0][0]", F, SCALAR), ("[1][1]", F, SCALAR)),
            Difference("[1][1]", "None", "float32[]"),
        ),
        (
            value("P(x=*, y=None)", (".x", F, SCALAR)),
            value("P(x=*, y=*)", (".x", F, SCALAR), (".y", F, SCALAR)),
            Difference(".y", "None", "float32[]"),
        ),
        (value("[]"), value("()"), Difference("the value", "a list", "a tuple")),
        (value("[[[", ("x", F, ())), value("]]]", ("x", INT, ())), Difference("x", "float32[]", "int64[]")),
        (value("[[["), value("]]]"), Difference("the structure", "[[[", "]]]")),
    ],
)
def test_difference(theirs: Collective, ours: Collective, expected: Difference | None) -> None:
    assert find_difference(theirs, ours) == expected


@pytest.mark.parametrize("structure", ["[" * 5000, "(" * 200 + ")" * 200, "\0", "'", "x" * 30_000, "[*" * 50])
def test_a_structure_from_a_stranger_does_no_harm(structure: str) -> None:
    describe_paths(value(structure))


def test_long_values_are_cut_in_the_description() -> None:
    many = value("[]", *((f"[{index}]", F, (index,)) for index in range(1000)))
    assert describe_collective(many).endswith("(1000 leaves)")
    assert len(describe_collective(many)) < 500
