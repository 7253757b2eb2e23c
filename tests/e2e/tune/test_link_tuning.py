"""`--tune`: links are measured once, all workers choose by the same table, and later runs repeat it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.forked_launch import run_launcher

import collectived as cd
from collectived_native.cores import count_cores
from collectived_proto.codec import tiers_from_proto
from collectived_proto.types import Peer, Tier
from collectived_proto.v1 import coordinator_pb2 as pb
from collectived_proto.v1 import coordinator_pb2_grpc as rpc
from collectived_proto.v1 import status_pb2
from collectived_runtime.coordinator.core.events import LinkMeasured
from collectived_runtime.coordinator.core.tuning import make_table, worst_case_model


class Distortion(rpc.CoordinatorServicer):
    """Stands between the workers and their coordinator.

    What bandwidth worker 1 has measured arrives as a tenth, or, where it is to be `silent`, not at all.
    """

    def __init__(self) -> None:
        self.silent = False
        self.told: list[pb.Measured] = []
        self._pool = ThreadPoolExecutor(16)
        self._server = grpc.server(self._pool)
        rpc.add_CoordinatorServicer_to_server(self, self._server)
        self._folder = tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp")

    def start(self, coordinator: str) -> str:
        self._channel = grpc.insecure_channel(coordinator)
        self._stub = rpc.CoordinatorStub(self._channel)
        address = f"unix:{self._folder.name}/c"
        self._server.add_insecure_port(address)
        self._server.start()
        return address

    def close(self) -> None:
        self._server.stop(1.0).wait()
        self._channel.close()
        self._pool.shutdown()
        self._folder.cleanup()

    def Attach(self, requests: Iterator[pb.WorkerMessage], context: Any) -> Iterator[pb.CoordinatorMessage]:
        answers: Iterator[pb.CoordinatorMessage] = self._stub.Attach(self._altered(requests))
        return answers

    def _altered(self, requests: Iterator[pb.WorkerMessage]) -> Iterator[pb.WorkerMessage]:
        task = -1
        for message in requests:
            if message.HasField("hello"):
                task = message.hello.task
            elif message.HasField("measured"):
                if task == 1 and self.silent:
                    continue
                if task == 1:
                    message.measured.bytes_per_second /= 10
                self.told.append(message.measured)
            yield message


@pytest.fixture(scope="module", autouse=True)  # so that they end after the clusters behind them
def distortions() -> Iterator[list[Distortion]]:
    made: list[Distortion] = []
    yield made
    for one in made:
        one.close()


@pytest.fixture
def distortion(distortions: list[Distortion]) -> Distortion:
    distortions.append(Distortion())
    return distortions[-1]


def status_of(coordinator: str) -> status_pb2.StatusReply:
    with grpc.insecure_channel(coordinator) as channel:
        reply: status_pb2.StatusReply = rpc.CoordinatorStub(channel).Status(status_pb2.StatusRequest(), timeout=5)
    return reply


def tables_in_use(cluster: Any, size: int) -> list[tuple[Tier, ...]]:
    """Forms the group `tuned`, sums in it, and tells what the coordinator and each worker choose by."""

    def body(_: cd.Session, group: cd.Group) -> list[tuple[Tier, ...]]:
        for count in (1, 1 << 10, 1 << 20):
            total = group.all_reduce("sum", np.full(count, 1.0 + group.rank, np.float32))
            assert np.array_equal(total, np.full(count, size * (size + 1) / 2, np.float32))
        found: list[tuple[Tier, ...]] = []
        if group.rank == 0:
            reply = status_of(cluster.coordinator_address)
            (known,) = reply.groups
            found = [tiers_from_proto(known.table)]
            found += [tiers_from_proto(group_loop.table) for worker in reply.workers for group_loop in worker.lanes]
        group.barrier()
        return found

    found: list[tuple[Tier, ...]] = cluster.run_sessions(size, body, "tuned")[0]
    return found


def test_links_are_measured_once_and_later_runs_use_the_table(make_cluster: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "state" / "tables.json"
    options = ("--tune", "--tables", str(file))
    first = tables_in_use(make_cluster(2, options=options), 2)
    assert len(first) == 3 and len(set(first)) == 1
    assert json.loads(file.read_text()) == {"tuned 1,1": [asdict(tier) for tier in first[0]]}
    written = file.stat().st_mtime_ns
    assert tables_in_use(make_cluster(2, options=options), 2) == first
    assert file.stat().st_mtime_ns == written
    assert [path.name for path in file.parent.iterdir()] == ["tables.json"]


def test_a_stored_table_is_used_whatever_the_links_are(make_cluster: Callable[..., Any], tmp_path: Path) -> None:
    rows = (Tier("tree", 1, 64, 1 << 20), Tier("ring", 2, -1, 1 << 20))
    file = tmp_path / "tables.json"
    file.write_text(json.dumps({"tuned 2,2": [asdict(tier) for tier in rows]}))
    assert tables_in_use(make_cluster(2, options=("--tune", "--tables", str(file))), 4) == [rows] * 3


def test_workers_whose_measurements_differ_tenfold_choose_alike(
    make_cluster: Callable[..., Any], distortion: Distortion, tmp_path: Path
) -> None:
    options = ("--tune", "--tables", str(tmp_path / "tables.json"))
    found = tables_in_use(make_cluster(3, options=options, through=distortion.start), 3)
    told = [
        LinkMeasured(0, link.generation, link.peer, link.latency_seconds, link.bytes_per_second)
        for link in distortion.told
    ]
    assert len(told) == 3 and all(link.is_valid for link in told), distortion.told
    peers = [Peer(task, "", "", "", (task,)) for task in range(3)]
    assert found == [make_table(peers, worst_case_model(told), 3 / count_cores())] * 4


def test_a_worker_that_never_answers_is_not_waited_for(
    make_cluster: Callable[..., Any], distortion: Distortion, tmp_path: Path
) -> None:
    file = tmp_path / "tables.json"
    distortion.silent = True
    found = tables_in_use(make_cluster(2, options=("--tune", "--tables", str(file)), through=distortion.start), 2)
    assert len(found) == 3 and len(set(found)) == 1
    assert not file.exists()


def test_who_gives_up_while_links_are_measured_holds_nobody_up(
    make_cluster: Callable[..., Any], distortion: Distortion, tmp_path: Path
) -> None:
    options = ("--tune", "--tables", str(tmp_path / "tables.json"))
    distortion.silent = True
    cluster = make_cluster(2, options=options, through=distortion.start)

    def give_up() -> None:
        with (
            cd.connect(cluster.addresses[1]) as session,
            pytest.raises(cd.errors.DeadlineExceededError, match="are being measured"),
        ):
            session.join("tuned", 2, rank=1, timeout=1)

    def stay() -> None:
        with (
            cd.connect(cluster.addresses[0]) as session,
            session.join("tuned", 2, rank=0, timeout=20) as group,
            pytest.raises(cd.errors.UnavailableError, match="it gave up joining"),
        ):
            group.all_reduce("sum", 1.0, options=cd.CommunicationOptions(timeout_seconds=20))

    with ThreadPoolExecutor(2) as pool:
        for waiting in (pool.submit(give_up), pool.submit(stay)):
            waiting.result()


def test_launch_stores_what_it_measured_where_the_user_keeps_state(tmp_path: Path) -> None:
    program = "import collectived as cd\nwith cd.connect() as s, s.join(timeout=20) as g: print(g.all_reduce('sum', 1))"
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    launch = [sys.executable, "-m", "collectived_launcher", "launch", "--workers", "2", "--tune"]
    done = run_launcher([*launch, "--", sys.executable, "-c", program], environment, timeout=60)
    assert done.returncode == 0, done
    assert list(json.loads((tmp_path / "collectived" / "tables.json").read_text())) == ["world 1,1"]
