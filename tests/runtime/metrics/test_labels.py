"""Names of groups as labels: bounded, and kept while they matter."""

from __future__ import annotations

from collectived_runtime.metrics.labels import MAX_GROUP_LABELS, OTHER, GroupLabelAllocator, assign_labels


def test_a_name_keeps_its_label_from_one_group_to_the_next() -> None:
    names = GroupLabelAllocator(2)
    assert names.acquire("a") == ("a", None)
    names.release("a")
    assert names.acquire("b") == ("b", None)
    assert names.acquire("a") == ("a", None)


def test_names_beyond_the_bound_are_counted_together() -> None:
    names = GroupLabelAllocator(2)
    assert [names.acquire(name)[0] for name in "abcd"] == ["a", "b", OTHER, OTHER]
    names.release(OTHER)


def test_the_name_that_ended_longest_ago_makes_room() -> None:
    names = GroupLabelAllocator(3)
    for name in "abc":
        names.acquire(name)
    names.release("b")
    names.release("a")
    assert names.acquire("d") == ("d", "b")
    assert names.acquire("e") == ("e", "a")
    assert names.acquire("f") == (OTHER, None)


def test_a_name_of_which_one_group_still_runs_stays() -> None:
    names = GroupLabelAllocator(1)
    names.acquire("a")
    names.acquire("a")
    names.release("a")
    assert names.acquire("b") == (OTHER, None)
    names.release("a")
    assert names.acquire("b") == ("b", "a")


def test_however_many_names_there_are_so_many_labels() -> None:
    names = GroupLabelAllocator()
    assert len({names.acquire(f"g{number}")[0] for number in range(1000)}) == MAX_GROUP_LABELS + 1
    assert len(set(assign_labels([f"g{number}" for number in range(1000)]).values())) == MAX_GROUP_LABELS + 1
    assert assign_labels(["b", "a", "b"]) == {"a": "a", "b": "b"}
