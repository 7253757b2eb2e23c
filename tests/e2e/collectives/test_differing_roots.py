"""Ranks on different workers that name different roots: nobody gets the value of a root that it has not named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectived as cd

pytestmark = pytest.mark.parametrize("transport", ["shared memory", "grpc"], indirect=True)

LENGTH = 8


def value_of(rank: int) -> Any:
    return np.arange(LENGTH) + 100 * rank


def broadcast(group: cd.Group, root: int, template: bool) -> Any:
    given = value_of(root) if group.rank == root else np.zeros(LENGTH, int) if template else None
    return group.broadcast(given, root), value_of(root)


def scatter(group: cd.Group, root: int, _: bool) -> Any:
    given = value_of(root) if group.rank == root else None
    rows = LENGTH // group.size
    return group.scatter(given, root), value_of(root)[group.rank * rows : (group.rank + 1) * rows]


@pytest.mark.parametrize("roots", [(0, 0, 2, 2), (0, 2, 2, 0), (3, 1, 1, 3), (0, 1, 0, 0)], ids=str)
@pytest.mark.parametrize(
    ("call", "template"),
    [(broadcast, False), (broadcast, True), (scatter, False)],
    ids=["broadcast to whoever takes it", "broadcast into templates", "scatter"],
)
def test_all_hear_of_two_roots_and_nobody_gets_the_value_of_the_other(
    four_workers: Any, roots: tuple[int, ...], call: Any, template: bool
) -> None:
    def body(group: cd.Group) -> Any:
        try:
            got, expected = call(group, roots[group.rank], template)
        except cd.errors.InvalidArgumentError as error:
            caught = error
        else:  # all that it could see was alike: it hears at its next call
            assert np.array_equal(got, expected)
            with pytest.raises(cd.errors.InvalidArgumentError) as later:
                group.barrier()
            caught = later.value
        assert group.all_reduce("sum", 1) == group.size
        return caught.instance, [member.rank for member in caught.differing], str(caught)

    told = four_workers.run(4, body)
    assert len(set(map(str, told))) == 1, "one verdict for all"
    instance, differing, text = told[0]
    assert instance == 0 and differing and "root" in text, told
