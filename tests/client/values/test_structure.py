"""A nest is rebuilt from the text that says its structure, and from no other."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectived.values import nest, structure
from collectived.values.indexed_slices import IndexedSlices
from collectived.values.sparse import expand_slices

Point = namedtuple("Point", "x y")
Colour = enum.Enum("Colour", "RED")

keys = st.text(max_size=4) | st.sampled_from(["it's", '"', "a\\", "[*]", "\n", "é", "None", "{'a': *}", "\udcff"])
nests = st.recursive(
    st.none() | st.just(1),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(st.integers() | st.floats(allow_nan=False, allow_infinity=False), inner, max_size=3)
        | st.dictionaries(st.tuples(st.integers(), keys), inner, max_size=2)
        | st.dictionaries(st.binary(max_size=3), inner, max_size=2)
        | st.tuples(inner, inner).map(lambda pair: Point(*pair))
    ),
    max_leaves=12,
)


def numbered(value: Any) -> Any:
    spec, leaves = nest.flatten(value)
    return nest.unflatten(spec, range(len(leaves)))


@given(nests)
def test_what_is_rebuilt_has_the_same_structure_and_equal_containers(value: Any) -> None:
    text = nest.structure(nest.flatten(value)[0])
    spec = structure.parse(text)
    assert nest.structure(spec) == text
    count = len(nest.flatten(value)[1])
    assert nest.unflatten(spec, range(count)) == numbered(value)


def test_a_namedtuple_comes_back_with_its_name_and_fields() -> None:
    spec = structure.parse("[Point(x=*, y=None), Empty()]")
    point, empty = nest.unflatten(spec, [5])
    assert (point.x, point.y, type(point).__name__) == (5, None, "Point") and empty == ()
    again = nest.unflatten(structure.parse("(Point(x=*, y=*),)"), [1, 2])[0]
    assert type(again) is type(point), "one type for one name and fields"


def test_keys_keep_their_types() -> None:
    assert [type(key) for key in nest.unflatten(structure.parse("{True: *, 2: *, 2.5: *}"), range(3))] == [
        bool,
        int,
        float,
    ]
    assert nest.unflatten(structure.parse("{None: *}"), [1]) == {None: 1}
    assert nest.unflatten(structure.parse("{-1: *, (1, (2,), ()): *}"), [1, 2]) == {-1: 1, (1, (2,), ()): 2}


def test_subclasses_come_back_as_what_they_are_based_on() -> None:
    text = nest.structure(nest.flatten(OrderedDict(a=1))[0])
    assert type(nest.unflatten(structure.parse(text), [1])) is dict


def test_sparse_values_are_rebuilt() -> None:
    slices = IndexedSlices(np.ones((2, 3)), np.array([4, 0]), (9, 3))
    spec, leaves, _ = expand_slices(*nest.flatten({"emb": slices}))
    text = nest.structure(spec)
    assert text == "{'emb': IndexedSlices(values=*, indices=*, dense_shape=(*, *))}"
    found = nest.unflatten(structure.parse(text), [np.asarray(leaf) for leaf in leaves])["emb"]
    assert isinstance(found, IndexedSlices) and found.dense_shape == (9, 3)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "*,", "**", "[*", "(*", "{'a': *", "[*]]", "{*: *}", "{'a'}", "{'a' *}", "x", "x()y", "'a'", "1"),
        *("[* *]", "P(x *)", "P(x=)", "P(1=*)", "P(x=*", "P(class=*)", "P(_x=*)", "P(x=*, x=*)", "{x: *}", "{'a: *}"),
        *("{<Colour.RED: 1>: *}", "{np.str_('a'): *}", "{f(1): *}", "{b'\\x': *}", "__import__('os')", "{1_: *}"),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        structure.parse(text)


def test_a_key_that_is_no_literal_is_named() -> None:
    text = nest.structure(nest.flatten({Colour.RED: 1})[0])
    with pytest.raises(ValueError, match="cannot be rebuilt: it has '<Colour.RED"):
        structure.parse(text)
    with pytest.raises(ValueError, match="the key 'f', which is no literal"):
        structure.parse("{f(1): *}")


def test_deep_text_is_refused_and_no_danger() -> None:
    assert nest.structure(structure.parse("[" * 90 + "*" + "]" * 90)).count("[") == 90
    for opening in ("[", "{1: ", "P(x=", "{(", "("):
        with pytest.raises(ValueError):
            structure.parse(opening * 100_000)


def test_long_text_is_shown_in_part() -> None:
    with pytest.raises(ValueError) as caught:
        structure.parse("[" + "*, " * 10_000 + "!]")
    assert len(str(caught.value)) < 400
