"""Nests come apart in one order on every rank, and together again as the caller had them."""

from __future__ import annotations

import ast
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectived.values import nest

Point = namedtuple("Point", "x y")

nests = st.recursive(
    st.none() | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
        | st.tuples(inner, inner).map(lambda pair: Point(*pair))
    ),
    max_leaves=12,
)


def ordered(value: Any) -> Any:
    """With dicts as lists of items, so that their order counts."""
    if isinstance(value, dict):
        return [(key, ordered(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [ordered(part) for part in value]
    return value


@given(nests)
def test_a_nest_comes_back_as_it_was_in_the_callers_order(value: Any) -> None:
    spec, leaves = nest.flatten(value)
    assert ordered(nest.unflatten(spec, leaves)) == ordered(value)


@given(nests)
def test_a_path_indexes_its_leaf(value: Any) -> None:
    spec, leaves = nest.flatten(value)
    paths = nest.paths(spec)
    assert [eval(f"value{path}", {"value": value}) for path in paths] == leaves


@given(nests)
def test_the_structure_is_an_expression_with_stars_for_leaves(value: Any) -> None:
    spec, leaves = nest.flatten(value)
    text = nest.structure(spec)
    names = {"Point": Point}
    if "*" not in repr(value):
        shown = eval(compile(ast.parse(text.replace("*", "0"), mode="eval"), "", "eval"), names)
        assert nest.flatten(shown) == (spec_in_sorted_order(spec), [0] * len(leaves))


def spec_in_sorted_order(spec: nest.Spec) -> nest.Spec:
    if not isinstance(spec, nest.Node):
        return spec
    return spec._replace(children=tuple(map(spec_in_sorted_order, spec.children)), keys=spec.order)


def test_leaves_of_a_dict_come_by_sorted_key() -> None:
    assert nest.flatten({"b": 1, "a": [2, (3,)]})[1] == [2, 3, 1]
    assert nest.structure(nest.flatten({"b": 1, "a": [2, (3,), None]})[0]) == "{'a': [*, (*,), None], 'b': *}"


def test_equal_nests_have_equal_specs_and_others_do_not() -> None:
    assert nest.flatten({"a": 1})[0] == nest.flatten({"a": 2})[0]
    different = [{"a": 1}, {"b": 1}, [1], (1,), 1, None, {1: 1}, {True: 1}, {1.0: 1}, Point(1, 1), (1, 1)]
    assert len({nest.flatten(value)[0] for value in different}) == len(different)


def test_paths_are_as_a_user_would_index() -> None:
    value = {"layer1": [1, 2], "point": Point(3, (4,))}
    assert nest.paths(nest.flatten(value)[0]) == ("['layer1'][0]", "['layer1'][1]", "['point'].x", "['point'].y[0]")
    assert nest.paths(nest.flatten(5)[0]) == ("",)


def test_key_paths_are_the_same_for_programs() -> None:
    value = {"layer1": [1, 2], "point": Point(3, (4,))}
    spec = nest.flatten(value)[0]
    assert nest.key_paths(spec) == (("layer1", 0), ("layer1", 1), ("point", "x"), ("point", "y", 0))
    assert nest.key_paths(nest.flatten(5)[0]) == ((),)
    assert nest.key_paths(nest.flatten({2: None, 1: [{}, 7]})[0]) == ((1, 1),)


def test_an_ordered_dict_stays_one() -> None:
    spec, leaves = nest.flatten(OrderedDict(b=1, a=2))
    assert nest.unflatten(spec, leaves) == OrderedDict(b=1, a=2)
    assert type(nest.unflatten(spec, leaves)) is OrderedDict


def test_keys_that_do_not_sort_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"'a' \(str\), 1 \(int\).*use keys of one type"):
        nest.flatten({"a": 1, 1: 2})


def test_a_list_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contain itself"):
        nest.flatten(loop)


def test_a_defaultdict_keeps_its_factory_which_makes_no_other_structure() -> None:
    value: Any = defaultdict(list, {"b": 1, "a": defaultdict(None, x=2)})
    spec, leaves = nest.flatten(value)
    found = nest.unflatten(spec, leaves)
    assert found == value and type(found) is defaultdict and found["new"] == []
    assert type(found["a"]) is defaultdict and found["a"].default_factory is None
    other: Any = defaultdict(int, value)
    assert spec == nest.flatten(other)[0] and hash(spec) == hash(nest.flatten(other)[0])


class Config(dict[str, Any]):
    def __init__(self, name: str, items: Any) -> None:
        super().__init__(items)


class Whole(tuple[int, ...]):
    def __new__(cls, numbers: Any) -> Whole:
        return super().__new__(cls, [n.__index__() for n in numbers])


@pytest.mark.parametrize(
    ("value", "leaves", "says"),
    [
        ({"c": [Config("x", {"a": 1})]}, [1], r"\['c'\]\[0\] is a Config, which cannot be made of .*'items'"),
        (Whole([1, 2]), [1.0, 2.0], "the value is a Whole, which cannot be made .*__index__.*; give a list, tuple"),
    ],
    ids=["another constructor", "other elements"],
)
def test_containers_that_cannot_be_rebuilt_are_named(value: Any, leaves: list[Any], says: str) -> None:
    spec, _ = nest.flatten(value)
    assert nest.has_custom_classes(spec)
    with pytest.raises(TypeError, match=says):
        nest.check_rebuildable(spec, leaves)


class Hungry(list[Any]):
    def __init__(self, items: Any) -> None:
        super().__init__(items)
        if items and items[0] is None:
            raise MemoryError("no memory is left")


def test_a_class_is_not_to_blame_for_memory_that_runs_out() -> None:
    spec, _ = nest.flatten({"c": Hungry([1])})
    with pytest.raises(MemoryError, match="no memory is left"):
        nest.check_rebuildable(spec, [None])


def test_those_that_can_are_found_to() -> None:
    dicts: list[Any] = [OrderedDict(b=1, a=[2, None]), defaultdict(int, a=1)]
    for value in (*dicts, Point(1, OrderedDict()), Whole([1])):
        spec, leaves = nest.flatten(value)
        nest.check_rebuildable(spec, leaves)
    assert not nest.has_custom_classes(nest.flatten({"a": [1, (2, None)]})[0])
