"""Snippets of the guides that are parts of a program: run as two ranks, with what stands before them in a program."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tests.docs.blocks import Block, claimed
from tests.e2e.conftest import Cluster

import collectived as cd

HALVES, REFUSED, FEEDBACK = claimed(__file__, "docs/guide/compression.md")
(TRIES,) = claimed(__file__, "docs/guide/errors.md")
(ELASTIC,) = claimed(__file__, "docs/guide/recovery.md")


def run(block: Block, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(block.text, block.place, "exec"), names := {"cd": cd, **names})
    return names


def test_a_mean_travels_in_fewer_bytes(cluster: Cluster) -> None:
    def body(group: cd.Group) -> Any:
        return run(HALVES, {"group": group, "grads": np.linspace(-1, 1, 1000, dtype=np.float32) * group.rank})["grads"]

    for mean in cluster.run(2, body):
        assert np.abs(mean - np.linspace(-1, 1, 1000) / 2).max() < 0.01


def test_a_rank_that_compresses_alone_is_named(cluster: Cluster) -> None:
    def body(group: cd.Group) -> str:
        options = cd.CommunicationOptions(compression="int8" if group.rank == 1 else "none", timeout_seconds=20)
        with pytest.raises(cd.errors.InvalidArgumentError) as caught:
            group.all_reduce("sum", np.ones(1000, np.float32), options=options)
        return str(caught.value).partition(" (")[0]

    assert cluster.run(3, body) == [REFUSED.text.strip()] * 3


def test_what_rounding_takes_is_added_to_the_next_value(cluster: Cluster) -> None:
    small = np.array([0.001, 1.0], np.float32)  # beside the other it is rounded to the same value, step after step

    def body(group: cd.Group) -> Any:
        taken: list[Any] = []

        def gradients(weights: Any, images: Any, labels: Any) -> Any:
            return small

        class Batches:
            def __iter__(self) -> Any:
                for _ in range(64):
                    yield "images", "labels"
                    taken.append(names["grads"])

        names: dict[str, Any] = {"cd": cd, "group": group, "weights": 0, "gradients": gradients, "batches": Batches()}
        exec(compile(FEEDBACK.text, FEEDBACK.place, "exec"), names)
        return np.mean(taken, axis=0)

    for mean in cluster.run(2, body):
        assert np.allclose(mean, small, rtol=0.2)


@pytest.mark.parametrize("rejoins", [True, False])
def test_an_error_says_whether_to_join_again(rejoins: bool, cluster: Cluster) -> None:
    call = "group.barrier(cd.CommunicationOptions(timeout_seconds=0.2)) if group.rank else group.recv(source=1)"
    call = call if rejoins else 'group.all_reduce("sum" if group.rank else "max", 1)'
    source, found = re.subn(r"^    \.\.\.$", f"    {call}", TRIES.text, flags=re.MULTILINE)
    assert found == 1

    def body(group: cd.Group) -> Any:
        if rejoins:
            exec(source, {"cd": cd, "group": group})
            return group.all_reduce("sum", 1)
        with pytest.raises(cd.errors.InvalidArgumentError, match="differs"):
            exec(source, {"cd": cd, "group": group})
        return 2

    assert cluster.run(2, body) == [2, 2]


def test_an_elastic_group_starts_with_those_who_come_in_time(cluster: Cluster) -> None:
    text = ELASTIC.text.replace("settle=5.0", "settle=0.2")
    assert text != ELASTIC.text

    def body(session: cd.Session, _: cd.Group) -> int:
        names: dict[str, Any] = {"session": session}
        exec(text, names)
        with names["group"] as group:
            return int(group.size)

    assert cluster.run_sessions(2, body) == [2, 2]
