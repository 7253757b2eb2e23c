"""Names of groups as labels: bounded, and kept while they matter."""

from __future__ import annotations

from collectived_runtime.metrics.labels import MOST, OTHER, GroupNames, first


def test_a_name_keeps_its_label_from_one_group_to_the_next() -> None:
    names = GroupNames(2)
    assert names.begin("a") == ("a", None)
    names.end("a")
    assert names.begin("b") == ("b", None)
    assert names.begin("a") == ("a", None)


def test_names_beyond_the_bound_are_counted_together() -> None:
    names = GroupNames(2)
    assert [names.begin(name)[0] for name in "abcd"] == ["a", "b", OTHER, OTHER]
    names.end(OTHER)


def test_the_name_that_ended_longest_ago_makes_room() -> None:
    names = GroupNames(3)
    for name in "abc":
        names.begin(name)
    names.end("b")
    names.end("a")
    assert names.begin("d") == ("d", "b")
    assert names.begin("e") == ("e", "a")
    assert names.begin("f") == (OTHER, None)


def test_a_name_of_which_one_group_still_runs_stays() -> None:
    names = GroupNames(1)
    names.begin("a")
    names.begin("a")
    names.end("a")
    assert names.begin("b") == (OTHER, None)
    names.end("a")
    assert names.begin("b") == ("b", "a")


def test_however_many_names_there_are_so_many_labels() -> None:
    names = GroupNames()
    assert len({names.begin(f"g{number}")[0] for number in range(1000)}) == MOST + 1
    assert len(set(first([f"g{number}" for number in range(1000)]).values())) == MOST + 1
    assert first(["b", "a", "b"]) == {"a": "a", "b": "b"}
