"""Every algorithm through real workers, by tables that a file holds: right sums, whatever carries them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectived as cd

ALGORITHMS = ("ring", "tree", "halving_doubling", "shuffle", "double_tree", "one_shot")
SHARDS = (1, 2, 3)


@pytest.fixture(scope="module", params=[(3, 2), (4, 1)], ids=lambda shape: f"{shape[0]} workers x {shape[1]}")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make_cluster: Any) -> Any:
    workers, ranks = request.param
    shape = ",".join([str(ranks)] * workers)
    tables = {
        f"{algorithm}-{shards} {shape}": [
            {"algorithm": algorithm, "shards": shards, "limit": -1, "bytes_per_pack": 1 << 20}
        ]
        for algorithm in ALGORITHMS
        for shards in SHARDS
    }
    path: Path = tmp_path_factory.mktemp("tables") / "tables.json"
    path.write_text(json.dumps(tables))
    return make_cluster(workers, options=("--tables", str(path))), workers * ranks


def contribution(rank: int) -> dict[str, Any]:
    random = np.random.default_rng(rank)
    return {
        "large": random.standard_normal(300_007).astype(np.float32),
        "half": random.standard_normal(1001).astype(np.float16),
        "whole": random.integers(-9, 9, 77),
        "number": float(rank),
    }


def test_all_of_them_give_the_sum_and_agree(cluster: tuple[Any, int]) -> None:
    here, size = cluster
    exact = {
        key: np.sum([np.asarray(contribution(rank)[key], np.float64) for rank in range(size)], axis=0)
        for key in contribution(0)
    }
    seen: dict[str, Any] = {}
    for algorithm in ALGORITHMS:
        for shards in SHARDS:
            name = f"{algorithm}-{shards}"
            results = here.run(size, lambda group: group.all_reduce("sum", contribution(group.rank)), name=name)
            for key, expected in exact.items():
                found = [np.asarray(result[key]) for result in results]
                assert all(one.tobytes() == found[0].tobytes() for one in found), (name, key)
                tolerance = 1e-2 if key == "half" else 1e-5
                assert np.allclose(found[0], expected, rtol=tolerance, atol=tolerance), (name, key)
            seen[name] = results[0]["whole"]
    assert all(np.array_equal(whole, seen["ring-1"]) for whole in seen.values())


def test_max_of_signed_zeros_and_sums_of_nans_have_the_same_bits_everywhere(cluster: tuple[Any, int]) -> None:
    here, size = cluster
    patterns = np.array([0x80000000, 0x00000000, 0x7FC00001, 0xFFC00002, 0x7F800000, 0xFF800000], np.uint32)

    def body(group: cd.Group) -> tuple[bytes, bytes]:
        value = np.roll(patterns, group.rank).view(np.float32)
        return group.all_reduce("max", value).tobytes(), group.all_reduce("sum", value).tobytes()

    for algorithm in ALGORITHMS:
        results = here.run(size, body, name=f"{algorithm}-1")
        assert all(result == results[0] for result in results), algorithm


def test_status_shows_the_table_that_was_used(cluster: tuple[Any, int]) -> None:
    here, size = cluster

    def body(group: cd.Group) -> list[tuple[str, int]]:
        group.barrier()
        found = [known for known in here.status().groups if known.generation == group.generation]
        group.barrier()
        return [(tier.algorithm, tier.shards) for tier in found[0].table]

    assert here.run(size, body, name="shuffle-3")[0] == [("shuffle", 3)]
