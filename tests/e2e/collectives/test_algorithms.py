"""Every algorithm through real workers, by tables that a file holds: right sums, whatever carries them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import collectived as cd
from collectived_proto.codec import collective_to_proto
from collectived_proto.error_status import from_rpc_error
from collectived_proto.types import AllReduce, Collective, DType, Leaf, ReduceOp, Tier
from collectived_proto.v1 import common_pb2, worker_pb2, worker_pb2_grpc

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


@cache
def contribution(rank: int) -> dict[str, Any]:
    """Which nobody writes to."""
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


@pytest.mark.parametrize("algorithm", ["nccl", "nccl/rechd", "nccl/pscpu"])
def test_an_algorithm_for_gpus_is_refused_by_the_worker_and_the_device_is_named(
    cluster: tuple[Any, int], algorithm: str
) -> None:
    here, _ = cluster
    collective = Collective(
        AllReduce(ReduceOp.SUM), "*", (Leaf("", DType.FLOAT32, (3,)),), all_reduce_spec=(Tier(algorithm),)
    )
    with grpc.insecure_channel(here.addresses[0]) as channel:
        worker = worker_pb2_grpc.WorkerStub(channel)
        protocol = common_pb2.Protocol(lowest=1, highest=1, release="of this test")
        opening = worker.OpenSession(worker_pb2.OpenSessionRequest(protocol=protocol, job="test"))
        session = next(opening).opened.session
        request = worker_pb2.JoinRequest(session=session, name=f"refused {algorithm}", min_size=1, max_size=1)
        *_, last = worker.Join(request)
        joined = last.joined
        with pytest.raises(grpc.RpcError) as caught:
            worker.Prepare(
                worker_pb2.PrepareRequest(
                    session=session, key=joined.group.key, rank=0, collective=collective_to_proto(collective)
                )
            )
        error = from_rpc_error(caught.value, "the worker")
        opening.cancel()
    assert isinstance(error, cd.errors.UnimplementedError)
    assert repr(algorithm) in str(error) and "/job:worker/replica:0/task:0/device:CPU:0" in str(error)
