"""What NCCL carries out, through real group loops on fake GPUs and a NCCL of our own."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.fakes.cuda import FakeCuda
from tests.fakes.nccl import FakeNccl
from tests.runtime.engine.conftest import World, wait_for
from tests.runtime.engine.gpu.test_gpu_task import Party

from collectived_proto.errors import Code, UnimplementedError
from collectived_proto.types import (
    AllReduce,
    Broadcast,
    CommunicationImplementation,
    DType,
    Reduce,
    ReduceOp,
    ReportKind,
    Tier,
)
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.gpus import Gpu, select_gpus
from collectived_runtime.device.nccl.communicators import Communicators
from collectived_runtime.device.nccl.interface import NcclError, NcclRemoteError
from collectived_runtime.engine.base.poller import Timers
from collectived_runtime.engine.failure import peer_consensus, reporter
from collectived_runtime.engine.gpu import nccl_task
from collectived_runtime.engine.gpu.communicator import LaunchOrder, NcclContext
from collectived_runtime.engine.gpu.launch_queue import LaunchQueue, TicketKey
from collectived_runtime.engine.gpu.nccl_task import can_average_in_nccl, with_grace_period
from collectived_runtime.transport.link import Link, LinkBroken

NCCL: Any = {"implementation": CommunicationImplementation.NCCL}


class Group(Party):
    """The ranks of a group on the GPUs of a cluster."""

    def __init__(self, world: World, places: tuple[int, ...], gpus: list[tuple[Gpu, ...]]) -> None:
        self.world = world
        self.places = places
        self.gpus = []
        self.arenas = {}
        for rank, place in enumerate(places):
            task = next(task for task, local in enumerate(world.layout) if rank in local)
            self._local_rank(rank, gpus[task][max(0, place)].create_arena(2, 4 << 20))

    def all_reduce(self, values: list[Any], op: ReduceOp = ReduceOp.SUM, **described: Any) -> list[Any]:
        """What every rank has received."""
        for rank, value in enumerate(values):
            self.submit(rank, [value], AllReduce(op), **(described or NCCL))
        kind, count = values[0].dtype, values[0].size
        if op is ReduceOp.MEAN:
            kind = averaged(kind)
        return [self.result(rank, kind, count, self.world.ranks[rank].done()) for rank in range(len(values))]


def averaged(kind: np.dtype[Any]) -> np.dtype[Any]:
    """The type of a mean."""
    if kind.kind not in "iu":
        return kind
    return np.dtype(np.float64 if kind.itemsize > 2 else np.float32)


class Cluster:
    """Workers with two GPUs each, and NCCL."""

    def __init__(self, make: Callable[..., World], workers: int, hold: Path, most: int = 1 << 40) -> None:
        self._make = make
        self.cudas = [FakeCuda(2) for _ in range(workers)]
        self.nccls = [FakeNccl(None, hold, most=most, cuda=cuda) for cuda in self.cudas]
        self.died: queue.Queue[str] = queue.Queue()
        self.lost: list[str] = []
        self.groups: list[Group] = []
        self.gpus = [select_gpus(cuda, None, self.lost.append) for cuda in self.cudas]
        self.engines = [
            NcclContext(Communicators(nccl, cuda.set_device, self.died.put), {gpu.index: gpu for gpu in gpus})
            for nccl, cuda, gpus in zip(self.nccls, self.cudas, self.gpus, strict=True)
        ]

    def group(self, hosts: tuple[int, ...], places: tuple[int, ...], **options: Any) -> Group:
        """A group; a place below 0 has its value on the host: -1 is of GPU 0, -2 of GPU 1."""
        gpus = tuple(place if place >= 0 else -1 - place for place in places)
        world = self._make(*hosts, gpus=gpus, natives=self.engines[: len(hosts)], **options)
        self.groups.append(Group(world, places, self.gpus))
        return self.groups[-1]

    @property
    def calls(self) -> list[tuple[str, int]]:
        return [call for nccl in self.nccls for call in nccl.calls]

    def close(self) -> None:
        for engine in self.engines:
            engine.communicators.close()
        for nccl in self.nccls:
            nccl.close()
        for gpus in self.gpus:
            for gpu in gpus:
                gpu.close()
        for group in self.groups:
            group.let_go()
        for cuda in self.cudas:
            cuda.close()


Make = Callable[..., Cluster]


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    return tmp_path / "hold"


@pytest.fixture
def made() -> Iterator[list[Cluster]]:
    """Clusters, which end after the group loops that use them."""
    found: list[Cluster] = []
    yield found
    for one in found:
        one.close()


@pytest.fixture
def cluster(made: list[Cluster], world: Callable[..., World], hold: Path) -> Iterator[Make]:
    def make(workers: int, **options: Any) -> Cluster:
        made.append(Cluster(world, workers, hold, **options))
        return made[-1]

    yield make
    hold.unlink(missing_ok=True)


LAYOUTS = {
    "two workers": ((1, 1), (0, 0)),
    "two ranks on each GPU": ((2, 2), (0, 0, 0, 0)),
    "two GPUs of one worker": ((2,), (0, 1)),
    "workers with one GPU and with two": ((3, 1, 1), (0, 1, 0, 0, 1)),
    "a value on the host": ((2, 1), (0, -1, 0)),
    "all values on the host": ((1, 1), (-1, -1)),
}
DTYPES = [np.int32, ml_dtypes.bfloat16, np.float16, np.float32, np.float64, np.int64, np.uint8]


@pytest.mark.parametrize(("hosts", "places"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX], ids=lambda op: op.value)
def test_all_ranks_receive_what_numpy_finds(
    cluster: Make, hosts: tuple[int, ...], places: tuple[int, ...], dtype: Any, op: ReduceOp
) -> None:
    there = cluster(len(hosts))
    values = [(np.arange(500) % 40 + rank).astype(dtype) for rank in range(len(places))]
    exact = np.stack(values).astype(np.float64)
    expected = {ReduceOp.SUM: exact.sum(0), ReduceOp.MEAN: exact.mean(0), ReduceOp.MAX: exact.max(0)}[op]
    for got in there.group(hosts, places).all_reduce(values, op):
        assert (got == expected.astype(got.dtype)).all()
    assert there.calls and not there.lost and there.died.empty()


def test_the_lower_rank_of_a_gpu_is_left_where_its_value_comes_from_the_host(cluster: Make) -> None:
    values = [np.full(10, value, np.float32) for value in (1e8, 1.0, -1e8, 0.0)]
    for got in cluster(2).group((3, 1), (0, -1, 0, 0)).all_reduce(values):
        assert (got == 0).all()


def test_communicators_stay_warm_from_one_collective_to_the_next(cluster: Make) -> None:
    there = cluster(2)
    group = there.group((1, 1), (0, 0))
    for number in range(5):
        one = np.full(10, number, np.float32)
        assert (group.all_reduce([one, one])[1] == 2 * number).all()
    assert [nccl.inits for nccl in there.nccls] == [[0], [1]]
    assert len(there.calls) == 10


def test_several_packs_and_shards_are_launched_in_one_order_on_all_workers(cluster: Make) -> None:
    there = cluster(2)
    group = there.group((1, 1), (0, 0))
    value = np.arange(5000, dtype=np.float32)
    for got in group.all_reduce([value, value], all_reduce_spec=(Tier("nccl", shards=19),)):
        assert (got == 2 * value).all()
    assert there.nccls[0].calls == there.nccls[1].calls and len(there.nccls[0].calls) == 19


def test_what_one_call_does_not_take_is_called_for_in_parts(cluster: Make) -> None:
    there = cluster(2, most=300)
    value = np.arange(1000, dtype=np.int32)
    for got in there.group((1, 1), (0, 0)).all_reduce([value, value]):
        assert (got == 2 * value).all()
    assert [count for _, count in there.nccls[0].calls] == [300, 300, 300, 100]


@pytest.mark.parametrize("again", range(5))
def test_two_groups_whose_ranks_call_in_opposite_orders_both_go_on(cluster: Make, again: int) -> None:
    there = cluster(2)
    groups = [there.group((1, 1), (0, 0), key=key) for key in (7, 8)]
    value = np.ones(100, np.float32)
    for _ in range(10):
        for rank, order in ((0, groups), (1, groups[::-1])):
            for group in order:
                group.submit(rank, [value], AllReduce(ReduceOp.SUM), **NCCL)
        for group in groups:
            for rank in (0, 1):
                assert (group.result(rank, np.float32, 100, group.world.ranks[rank].done()) == 2).all()


def test_small_values_on_the_host_do_not_hold_up_what_comes_later(cluster: Make) -> None:
    """Folded at once they would keep their turn, which all others of this worker wait for."""
    there = cluster(1)
    hosts, devices = (there.group((2,), places, key=key) for key, places in ((7, (-1, -2)), (8, (0, 1))))
    value = np.ones(10, np.float32)
    for group in (hosts, hosts, devices):
        assert all((found == 2).all() for found in group.all_reduce([value, value]))


def test_ranks_that_differ_are_found_out_before_nccl_is_called(cluster: Make) -> None:
    there = cluster(2)
    group = there.group((1, 1), (0, 0))
    group.submit(0, [np.ones(10, np.float32)], AllReduce(ReduceOp.SUM), **NCCL)
    group.submit(1, [np.ones(11, np.float32)], AllReduce(ReduceOp.SUM), **NCCL)
    group.world.report(ReportKind.MISMATCH)
    assert there.calls == [] and [nccl.inits for nccl in there.nccls] == [[], []]


def test_a_rank_that_never_comes_leaves_the_gpu_to_other_groups(cluster: Make) -> None:
    there = cluster(2)
    late, prompt = (there.group((1, 1), (0, 0), key=key) for key in (7, 8))
    late.submit(0, [np.ones(10, np.float32)], AllReduce(ReduceOp.SUM), **NCCL)
    value = np.ones(10, np.float32)
    assert (prompt.all_reduce([value, value])[0] == 2).all()
    late.world.rule(late.world.verdict(Code.DEADLINE_EXCEEDED))
    assert late.world.ranks[0].failed()[1].code == Code.DEADLINE_EXCEEDED
    assert (prompt.all_reduce([value, value])[0] == 2).all()


def test_a_verdict_amid_a_kernel_aborts_it_and_the_gpu_is_usable_afterwards(cluster: Make) -> None:
    there = cluster(2)
    group = there.group((1, 1), (0, 0))
    value = np.ones(10, np.float32)
    group.all_reduce([value, value])
    for nccl in there.nccls:
        nccl.stuck = True
    for rank in (0, 1):
        group.submit(rank, [value], AllReduce(ReduceOp.SUM), **NCCL)
    wait_for(lambda: [len(nccl.calls) for nccl in there.nccls] == [2, 2])
    group.world.rule(group.world.verdict(Code.UNAVAILABLE))
    for rank in (0, 1):
        assert group.world.ranks[rank].failed()[1].code == Code.UNAVAILABLE
    wait_for(lambda: [nccl.freed for nccl in there.nccls] == [[("abort", 0)], [("abort", 1)]])
    for nccl in there.nccls:
        nccl.stuck = False
    assert (there.group((1, 1), (0, 0), key=9).all_reduce([value, value])[0] == 2).all()
    assert not there.lost and there.died.empty()


def fails_on(task: int, there: Cluster, group: Group, remaining: float = 0.0) -> None:
    """An all-reduce for which NCCL fails on that worker, after one that was well."""
    values = [np.ones(10, np.float32)] * len(group.places)
    group.all_reduce(values)
    there.nccls[task].broken = True
    for rank, value in enumerate(values):
        group.submit(rank, [value], AllReduce(ReduceOp.SUM), remaining=remaining, **NCCL)


def test_that_nccl_says_another_rank_is_gone_accuses_nobody(cluster: Make) -> None:
    there = cluster(2)
    group = there.group((1, 1), (0, 0))
    value = np.ones(10, np.float32)
    group.all_reduce([value, value])
    there.nccls[1].close()  # as if its process had ended
    for rank in (0, 1):
        group.submit(rank, [value], AllReduce(ReduceOp.SUM), **NCCL)
    told = [group.world.reports.get(timeout=10) for _ in range(2)]
    assert all((report.kind, report.instance) == (ReportKind.NATIVE, 1) for report in told)
    assert all("another rank, or the connection to it, is gone" in report.text for report in told)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_failure_of_nccl_here_is_told_before_the_others_hear_of_it_and_a_verdict_makes_the_gpu_usable(
    cluster: Make, workers: int
) -> None:
    there = cluster(workers)
    group = there.group((2,) * workers, (0, 1) * workers)
    fails_on(0, there, group)
    report = group.world.reports.get(timeout=10)
    assert (report.kind, report.instance, "a call to the system failed" in report.text) == (ReportKind.NATIVE, 1, True)
    assert [position.rank for position in report.ranks] == [0, 1]
    group.world.rule(group.world.verdict(Code.UNAVAILABLE))
    for rank in group.world.ranks:
        assert rank.failed()[1].message == "decided"
    there.nccls[0].broken = False
    value = np.ones(10, np.float32)
    again = there.group((2,) * workers, (0, 1) * workers, key=9).all_reduce([value] * 2 * workers)
    assert (again[0] == 2 * workers).all() and not there.lost


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that decide alone listen for as long as a busy machine may need, though not for those whose NCCL says
    later that another rank is gone."""
    monkeypatch.setattr(peer_consensus, "LISTEN_SECONDS", 1.0)
    monkeypatch.setattr(nccl_task, "GRACE_SECONDS", 3.0)
    monkeypatch.setattr(reporter, "NCCL_DECIDE_ALONE_SECONDS", 0.2)


@pytest.mark.parametrize("workers", [2, 3])
def test_without_a_coordinator_the_workers_agree_that_nccl_failed_and_that_nobody_is_known_to_be_lost(
    cluster: Make, patient: None, workers: int
) -> None:
    there = cluster(workers)
    group = there.group((1,) * workers, (0,) * workers, lost_after=0.3)
    fails_on(1, there, group)
    verdicts = [rank.failed()[1] for rank in group.world.ranks]
    assert len({verdict.message for verdict in verdicts}) == 1
    assert (
        "on worker 1, of rank 1 (" in verdicts[0].message and "no member of the group is known" in verdicts[0].message
    )
    assert all((verdict.code, verdict.missing) == (Code.UNAVAILABLE, ()) for verdict in verdicts)


def test_without_a_coordinator_a_link_that_breaks_names_who_is_lost_though_nccl_failed_before(
    cluster: Make, patient: None
) -> None:
    there = cluster(3)
    group = there.group((1, 1, 1), (0, 0, 0))
    fails_on(0, there, group)
    group.world.report(ReportKind.NATIVE)
    group_loop = group.world.group_loops[0]
    group_loop._poller.call_soon_threadsafe(lambda: group_loop._generation.on_link_broken(LinkBroken("cut", 1)))
    verdicts = [rank.failed()[1] for rank in group.world.ranks]
    assert len({verdict.message for verdict in verdicts}) == 1
    assert [member.rank for member in verdicts[0].missing] == [1] and "cut" in verdicts[0].message


def test_without_a_coordinator_a_deadline_ends_the_wait_and_nccl_is_what_failed(cluster: Make, patient: None) -> None:
    there = cluster(2)
    group = there.group((1, 1), (0, 0))
    fails_on(0, there, group, remaining=1.0)
    verdicts = [rank.failed()[1] for rank in group.world.ranks]
    assert verdicts[0].message == verdicts[1].message and verdicts[0].code == Code.UNAVAILABLE
    assert "a call to the system failed" in verdicts[0].message and not verdicts[0].missing


def test_a_coordinator_that_comes_back_hears_again_that_nccl_failed(cluster: Make) -> None:
    there = cluster(2)
    group = there.group((1, 1), (0, 0))
    fails_on(0, there, group)
    first = group.world.report(ReportKind.NATIVE)
    group.world.group_loops[0].resend_reports()
    assert group.world.report(ReportKind.NATIVE) == first
    group.world.rule(group.world.verdict(Code.UNAVAILABLE))
    assert group.world.ranks[0].failed()[1].message == "decided"


def test_the_last_rank_that_leaves_takes_the_communicators_along(cluster: Make, made: list[Cluster]) -> None:
    there = cluster(2)
    group = there.group((1, 1), (0, 0))
    value = np.ones(10, np.float32)
    group.all_reduce([value, value])
    for group_loop in group.world.group_loops:
        group_loop.stop()
    wait_for(lambda: [nccl.freed for nccl in there.nccls] == [[("destroy", 0)], [("destroy", 1)]])


def test_an_order_for_nccl_that_cannot_be_had_is_refused_and_says_why(cluster: Make) -> None:
    there = cluster(2)
    group = there.group((2, 1), (0, 1, 0))
    spec: Any = {"all_reduce_spec": (Tier("nccl"),)}
    with pytest.raises(UnimplementedError, match="NCCL has no bxor of int32"):
        group.submit(0, [np.ones(3, np.int32)], AllReduce(ReduceOp.BXOR), **spec)
    with pytest.raises(UnimplementedError, match="'nccl/xring' cannot be had here: NCCL has no sum of int16"):
        group.submit(0, [np.ones(3, np.int16)], AllReduce(ReduceOp.SUM), all_reduce_spec=(Tier("nccl/xring"),))


@pytest.mark.parametrize(("hosts", "places"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX], ids=lambda op: op.value)
def test_the_root_alone_receives_what_numpy_finds(
    cluster: Make, hosts: tuple[int, ...], places: tuple[int, ...], dtype: Any, op: ReduceOp
) -> None:
    there = cluster(len(hosts))
    group = there.group(hosts, places)
    values = [(np.arange(500) % 40 + rank).astype(dtype) for rank in range(len(places))]
    exact = np.stack(values).astype(np.float64)
    expected = {ReduceOp.SUM: exact.sum(0), ReduceOp.MEAN: exact.mean(0), ReduceOp.MAX: exact.max(0)}[op]
    for root in (len(places) - 1, 0):
        for rank, value in enumerate(values):
            group.submit(rank, [value], Reduce(op, root), receives=rank == root, **NCCL)
        done = [group.world.ranks[rank].done() for rank in range(len(places))]
        got = group.result(root, averaged(value.dtype) if op is ReduceOp.MEAN else dtype, 500, done[root])
        assert (got == expected.astype(got.dtype)).all()
    assert {kind for kind, _ in there.calls} == {"reduce"} and not there.lost and there.died.empty()


@pytest.mark.parametrize(("hosts", "places"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [*DTYPES, np.int16, np.complex128, np.bool_], ids=lambda dtype: np.dtype(dtype).name)
def test_all_ranks_receive_what_the_root_has(
    cluster: Make, hosts: tuple[int, ...], places: tuple[int, ...], dtype: Any
) -> None:
    there = cluster(len(hosts))
    group = there.group(hosts, places)
    for root in (0, len(places) - 1):
        values = [(np.arange(600) % 40 + rank).astype(dtype) for rank in range(len(places))]
        for rank, value in enumerate(values):
            group.submit(rank, [value[100:], value[:100]], Broadcast(root), **NCCL)
        for rank in range(len(places)):
            got = group.result(rank, dtype, 600, group.world.ranks[rank].done())
            assert (got == values[root]).all()  # a pack begins with the last leaf
    assert {kind for kind, _ in there.calls} == {"broadcas"} and not there.lost and there.died.empty()


TWO_LEVELS = ["nccl/xring", "nccl/rechd", "nccl/pscpu"]
SEVERAL = {
    "one worker": ((2,), (0, 1)),
    "two workers": ((2, 2), (0, 1, 0, 1)),
    "with one GPU, with two, and ranks that share one": ((3, 1, 1), (0, 1, 0, 0, 1)),
    "a value on the host": ((3, 1), (0, -1, 1, 0)),
    "all values on the host, elsewhere": ((2, 2), (0, 1, -1, -1)),
}


@pytest.mark.parametrize("name", TWO_LEVELS)
@pytest.mark.parametrize(("hosts", "places"), SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN], ids=lambda op: op.value)
def test_nccl_inside_of_workers_and_an_algorithm_between_them(
    cluster: Make, name: str, hosts: tuple[int, ...], places: tuple[int, ...], dtype: Any, op: ReduceOp
) -> None:
    there = cluster(len(hosts))
    values = [(np.arange(500) % 40 + rank).astype(dtype) for rank in range(len(places))]
    exact = np.stack(values).astype(np.float64)
    expected = exact.sum(0) if op is ReduceOp.SUM else exact.mean(0)
    group = there.group(hosts, places)
    for got in group.all_reduce(values, op, all_reduce_spec=(Tier(name, shards=2),)):
        assert (got == expected.astype(got.dtype)).all()
    assert not there.lost and there.died.empty()


def test_inside_of_a_worker_nccl_reduces_to_its_first_gpu_and_broadcasts_from_there(cluster: Make) -> None:
    there = cluster(2)
    group = there.group((2, 1), (0, 1, 0))
    value = np.arange(300, dtype=np.float32)
    for _ in range(3):
        for got in group.all_reduce([value] * 3, all_reduce_spec=(Tier("nccl/xring"),)):
            assert (got == 3 * value).all()
    kinds = [kind for kind, _ in there.nccls[0].calls]
    assert sorted(set(kinds)) == ["broadcas", "reduce"] and len(kinds) == 12
    assert sorted(there.nccls[0].inits) == [0, 1], "a communicator of its own GPUs, which stays"
    assert there.nccls[1].calls == [] and there.nccls[1].inits == []


@pytest.mark.parametrize("again", range(3))
def test_groups_over_the_same_gpus_of_one_worker_do_not_wait_for_each_other(cluster: Make, again: int) -> None:
    there = cluster(2)
    groups = [there.group((2, 1), (0, 1, 0), key=key) for key in (7, 8, 9)]
    kinds: list[Any] = [{"all_reduce_spec": (Tier(name, shards=4),)} for name in ("nccl/xring", "nccl", "nccl/rechd")]
    value = np.ones(100, np.float32)
    for number in range(8):
        for rank in range(3):
            for group, kind in list(zip(groups, kinds, strict=True))[:: 1 if (rank + number) % 2 else -1]:
                group.submit(rank, [value], AllReduce(ReduceOp.SUM), **kind)
        for group in groups:
            for rank in range(3):
                assert (group.result(rank, np.float32, 100, group.world.ranks[rank].done()) == 3).all()


def test_a_verdict_amid_a_kernel_inside_of_a_worker_aborts_it(cluster: Make) -> None:
    there = cluster(2)
    group = there.group((2, 1), (0, 1, 0))
    value, spec = np.ones(10, np.float32), (Tier("nccl/xring"),)
    group.all_reduce([value] * 3, all_reduce_spec=spec)
    there.nccls[0].stuck = True
    for rank in range(3):
        group.submit(rank, [value], AllReduce(ReduceOp.SUM), all_reduce_spec=spec)
    wait_for(lambda: [kind for kind, _ in there.nccls[0].calls].count("reduce") == 4)
    group.world.rule(group.world.verdict(Code.UNAVAILABLE))
    for rank in range(3):
        assert group.world.ranks[rank].failed()[1].code == Code.UNAVAILABLE
    wait_for(lambda: sorted(there.nccls[0].freed) == [("abort", 0), ("abort", 1)])
    there.nccls[0].stuck = False
    again = there.group((2, 1), (0, 1, 0), key=9)
    assert (again.all_reduce([value] * 3, all_reduce_spec=spec)[0] == 3).all()
    assert not there.lost and there.died.empty()


@pytest.mark.parametrize(("hosts", "places"), SEVERAL.values(), ids=SEVERAL)
def test_psgpu_folds_on_each_gpu_and_shuffles_between_workers(
    cluster: Make, hosts: tuple[int, ...], places: tuple[int, ...]
) -> None:
    values = [np.arange(300, dtype=np.float64) + rank for rank in range(len(places))]
    for got in cluster(len(hosts)).group(hosts, places).all_reduce(values, all_reduce_spec=(Tier("psgpu", shards=2),)):
        assert (got == np.sum(values, axis=0)).all()


@pytest.mark.parametrize("name", ["nccl/xring", "nccl/rechd", "nccl/pscpu", "psgpu"])
def test_with_one_gpu_per_worker_nothing_is_left_for_nccl_inside_of_it(cluster: Make, name: str) -> None:
    there = cluster(2)
    value = np.arange(300, dtype=np.float32)
    for got in there.group((1, 1), (0, 0)).all_reduce([value, value], all_reduce_spec=(Tier(name),)):
        assert (got == 2 * value).all()


def test_a_hint_for_what_nccl_cannot_do_falls_back_and_says_so(cluster: Make) -> None:
    there = cluster(2)
    group = there.group((1, 1), (0, 0))
    value = np.full(10, 5, np.int32)
    assert (group.all_reduce([value, value], ReduceOp.BXOR)[0] == 0).all()
    assert group.world.group_loops[0].notes == ["on GPUs, but not for NCCL: the hint NCCL falls back to RING"]
    assert there.calls == []


def test_tasks_are_launched_in_the_order_of_the_program_and_then_the_turn_is_over() -> None:
    stile, woken = LaunchQueue(), []
    key, later = TicketKey(1, 1, 0), TicketKey(2, 1, 0)
    stile.settle(key, stile.propose(key), lambda: None)
    waiting = stile.settle(later, stile.propose(later), lambda: None)
    order = LaunchOrder(key, 2, stile, lambda: woken.append(1))
    first, second = order.create_turn(0), order.create_turn(1)
    assert first.done and not second.done
    order.mark_launched()
    assert second.done and not first.done and len(woken) == 1 and not waiting.done
    order.mark_launched()
    assert waiting.done


@pytest.mark.parametrize(("op", "dtype", "single", "found"), [
    (ReduceOp.MEAN, DType.FLOAT32, True, True),
    (ReduceOp.MEAN, DType.FLOAT32, False, False),
    (ReduceOp.MEAN, DType.FLOAT16, True, False),
    (ReduceOp.MEAN, DType.INT32, True, False),
    (ReduceOp.SUM, DType.FLOAT32, True, False),
])  # fmt: skip
def test_nccl_divides_a_mean_where_every_gpu_has_one_rank_and_nothing_is_rounded_after_it(
    op: ReduceOp, dtype: DType, single: bool, found: bool
) -> None:
    result = DType.FLOAT64 if op is ReduceOp.MEAN and dtype.is_integer else dtype
    assert can_average_in_nccl(Arithmetic(op, dtype, result, 2), single) is found


def failing(error: NcclError) -> Iterator[Any]:
    yield from ()
    raise error


def test_that_a_rank_is_gone_is_said_after_those_who_know_which_and_all_else_at_once() -> None:
    alarms, threads = Timers(), threading.active_count()
    patient = with_grace_period(failing(NcclRemoteError(6, "all_reduce")), alarms)
    ((grace, _),) = next(patient)
    assert not isinstance(grace, Link) and not grace.done
    assert threading.active_count() == threads, "none per task that failed"
    wait_for(lambda: time.monotonic() >= alarms.next_deadline)
    assert grace.done
    alarms.discard_expired(time.monotonic())
    assert alarms.next_deadline == math.inf
    with pytest.raises(NcclRemoteError):
        next(patient)
    with pytest.raises(NcclError):
        next(with_grace_period(failing(NcclError(3, "all_reduce")), alarms))
