"""What ranks must agree on beside the shapes of arrays, and what no rank may give: all of them hear of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectived as cd

pytestmark = pytest.mark.parametrize("transport", ["shared memory", "grpc"], indirect=True)


@pytest.fixture(params=[1, 2])
def cluster(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("one_worker" if request.param == 1 else "two_workers")


def fail_alike(group: cd.Group, call: Any) -> cd.errors.InvalidArgumentError:
    """The error of a call that fails on all ranks, after which the group goes on."""
    with pytest.raises(cd.errors.InvalidArgumentError) as caught:
        call()
    assert group.all_reduce("sum", 1) == group.size
    assert caught.value.verdict is not None
    return caught.value


@pytest.mark.parametrize("dense", [False, True], ids=["alone", "beside a dense array"])
def test_a_reduction_compares_the_dense_shape_of_sparse_values(cluster: Any, dense: bool) -> None:
    def body(group: cd.Group) -> Any:
        rows = 9 if group.rank < 2 else 12
        if group.rank == 2:
            cluster.await_arrivals(group, 2)
        value = {"emb": cd.IndexedSlices(np.ones((2, 3)), np.arange(2), (rows, 3)), "b": np.ones(2) if dense else None}
        error = fail_alike(group, lambda: group.all_reduce("sum", value))
        return [member.rank for member in error.differing], str(error)

    for differing, text in cluster.run(3, body):
        assert differing == [2]
        assert "rank 2 differs: ['emb'].dense_shape[0] is 12 there, 9 on ranks 0, 1" in text


@pytest.mark.parametrize("call", ["all_gather", "gather"])
def test_a_gather_of_what_has_no_axis_fails_on_all_ranks(cluster: Any, call: str) -> None:
    def body(group: cd.Group) -> Any:
        error = fail_alike(group, lambda: getattr(group, call)({"loss": 3.0}))
        return [member.rank for member in error.differing], str(error)

    for differing, text in cluster.run(2, body):
        assert differing == []
        assert "['loss'] is 0-d" in text and "give it an axis" in text


def test_one_rank_that_gathers_what_has_no_axis_is_named_on_all(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        value = np.float32(3) if group.rank == 1 else np.ones(1, np.float32)
        if group.rank == 1:
            cluster.await_arrivals(group, 2)
        error = fail_alike(group, lambda: group.all_gather(value))
        return [member.rank for member in error.differing], str(error)

    for differing, text in cluster.run(3, body):
        assert differing == [1]
        assert "rank 1 at test_differing_values.py" in text and "float32[]" in text
