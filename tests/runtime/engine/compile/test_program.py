"""Programs: what is composed from a contract, and what is refused before anything is kept."""

from __future__ import annotations

from typing import Any

import pytest
from tests.runtime.plan import goals

from collectived_proto.errors import InvalidArgumentError, UnimplementedError
from collectived_proto.types import (
    AllGather,
    AllReduce,
    Barrier,
    Broadcast,
    Collective,
    CommunicationImplementation,
    DType,
    GroupInfo,
    Leaf,
    Member,
    Operation,
    Packing,
    Peer,
    Reduce,
    ReduceOp,
    Tier,
)
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.compile.negotiation import prepare
from collectived_runtime.engine.compile.program import CHANNELS, compile_program, count_tasks, gpu_participants
from collectived_runtime.engine.submit.validation import check
from collectived_runtime.plan import catalog
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.verify import postconditions
from collectived_runtime.plan.verify.verifier import verify_plans
from collectived_runtime.plan.wide_moves import WidePlan

TABLE = (Tier("tree", limit=1000), Tier("halving_doubling", 2))
SUM = AllReduce(ReduceOp.SUM)


def topology(*hosts: int, me: int = 0) -> GroupTopology:
    ranks = iter(range(sum(hosts)))
    peers = tuple(Peer(task, "", "", "", tuple(next(ranks) for _ in range(count))) for task, count in enumerate(hosts))
    members = tuple(
        Member(rank, f"/job:worker/replica:0/task:{peer.task}/device:CPU:0", peer.task, "", 0)
        for peer in peers
        for rank in peer.ranks
    )
    return GroupTopology.from_peers(GroupInfo("job/world", 1, 2, members), peers, me, TABLE)


def gpu_topology(*workers: tuple[str, ...], me: int = 0) -> GroupTopology:
    """A group with NCCL. By worker, the devices of its ranks."""
    members = tuple(
        Member(rank, f"/job:worker/replica:0/task:{task}/device:{device}", task, "", 0)
        for rank, (task, device) in enumerate((task, device) for task, own in enumerate(workers) for device in own)
    )
    ranks = [tuple(member.rank for member in members if member.worker == task) for task in range(len(workers))]
    peers = tuple(Peer(task, "", "", "", own, 22809) for task, own in enumerate(ranks))
    return GroupTopology.from_peers(GroupInfo("job/world", 1, 2, members), peers, me, TABLE)


def floats(*counts: int, operation: Operation = SUM, **fields: Any) -> Collective:
    leaves = tuple(Leaf(f"[{index}]", DType.FLOAT32, (count,)) for index, count in enumerate(counts))
    return Collective(operation, "*", leaves, **fields)


def test_the_table_decides_by_bytes_and_shards_have_channels_of_their_own() -> None:
    assert compile_program(floats(250), topology(1, 1, 1)).algorithm == "tree"
    program = compile_program(floats(251), topology(1, 1, 1))
    assert [(s.algorithm, s.shard, s.channel) for s in program.tasks] == [
        ("halving_doubling", 0, 0),
        ("halving_doubling", 1, 1),
    ]
    assert [len(task.span) for task in program.tasks] == [126, 125]


def test_a_hint_for_the_ring_forces_it_and_a_specification_comes_before_both() -> None:
    ring = CommunicationImplementation.RING
    assert compile_program(floats(10), topology(1, 1)).algorithm == "tree"
    assert compile_program(floats(10, implementation=ring), topology(1, 1)).algorithm == "ring"
    nccl = CommunicationImplementation.NCCL  # of which there is none on CPUs
    assert compile_program(floats(10, implementation=nccl), topology(1, 1)).algorithm == "ring"
    spec = (Tier("pscpu", 1, 100), Tier("xring", 3))
    program = compile_program(floats(10, implementation=ring, all_reduce_spec=spec), topology(1, 1))
    assert program.algorithm == "pscpu"
    assert len(compile_program(floats(100, all_reduce_spec=spec), topology(1, 1)).tasks) == 3


def test_a_specification_chooses_by_the_bytes_of_each_tensor_before_packing_and_keeps_their_order() -> None:
    spec = (Tier("pscpu", 1, 400), Tier("xring", 2))
    program = compile_program(floats(1000, 100, 101, 7, all_reduce_spec=spec), topology(1, 1))
    assert [(s.pack_number, s.algorithm, s.shard) for s in program.tasks] == [
        (0, "pscpu", 0),
        (1, "xring", 0),
        (1, "xring", 1),
    ]
    assert [pack.count for pack in program.layout.packs] == [107, 1101]
    assert [(place.pack, place.offset) for place in program.layout.places] == [(1, 101), (0, 7), (1, 0), (0, 0)]


def test_packs_by_number_are_cut_as_in_the_original() -> None:
    program = compile_program(floats(4, 7, packing=Packing(num_packs=3)), topology(1, 1))
    assert [len(task.span) for task in program.tasks] == [3, 3, 5]
    assert [(place.pack, place.offset) for place in program.layout.places] == [(0, 0), (0, 4)]
    few = compile_program(floats(2, packing=Packing(num_packs=4)), topology(1, 1))
    assert [len(task.span) for task in few.tasks] == [2], "what would be empty does not travel"


MANY: dict[str, tuple[Collective, str]] = {
    "num_packs": (floats(10, packing=Packing(num_packs=1 << 31)), "num_packs must be at most 4096, got 2147483648"),
    "shards": (
        floats(10, all_reduce_spec=(Tier("xring", 1 << 31),)),
        "shards in all_reduce_spec must be at most 4096, got 2147483648",
    ),
    "tiers": (
        floats(10, all_reduce_spec=tuple(Tier("xring", 1, limit) for limit in (*range(1000), -1))),
        "the number of tiers in all_reduce_spec must be at most 64, got 1001",
    ),
    "cuts and shards": (
        floats(10_000, all_reduce_spec=(Tier("xring", 3),), packing=Packing(num_packs=2000)),
        "6000 packs, and 4096 can travel .*; all_reduce_spec with up to 3 shards and num_packs=2000, for every type",
    ),
    "values by themselves": (
        floats(*[1] * 5000, packing=Packing()),
        "5000 packs, .*; num_packs=0 sends every value by itself",
    ),
    "small packs": (floats(*[2] * 5000, bytes_per_pack=1), "5000 packs, .*; bytes_per_pack=1: choose a larger one"),
    "leaves to be joined": (floats(*[2] * 5000, operation=AllGather()), "5000 packs, .*; all_gather.* every leaf"),
}


@pytest.mark.parametrize("case", MANY)
def test_more_than_can_travel_at_once_is_refused_by_name_before_it_is_built(case: str) -> None:
    collective, says = MANY[case]
    with pytest.raises(InvalidArgumentError, match=says):
        prepare(collective, 0, topology(1, 1))


def test_as_many_tasks_as_can_travel_at_once_are_counted_before_they_are_built() -> None:
    spec = (Tier("pscpu", 2, 40), Tier("xring", 5))
    for collective in (
        floats(4096, packing=Packing(num_packs=4096)),
        floats(3, all_reduce_spec=(Tier("xring", 4096),)),
        floats(10, 1000, 3, all_reduce_spec=spec, packing=Packing(num_packs=7)),
        floats(10, 1000, 3, all_reduce_spec=spec),
        floats(10, 1000, 3, bytes_per_pack=8),
        floats(0, packing=Packing(num_packs=3)),
        floats(10, 10, operation=AllGather(), packing=Packing(num_packs=3)),
        floats(10, operation=Broadcast(0), packing=Packing(num_packs=3)),
        Collective(Barrier(), "", ()),
    ):
        where = topology(1, 1)
        rows = tuple((10, 10) for _ in range(2)) if isinstance(collective.operation, AllGather) else ()
        tasks = compile_program(collective, where, rows).tasks
        assert len(tasks) == count_tasks(collective, where, prepare(collective, 0, where).layout) <= 4096
        assert all(len(task.span) for task in tasks) or not sum(leaf.count for leaf in collective.leaves)


def test_small_neighbours_travel_together_and_everything_else_alone() -> None:
    packing = Packing(max_bytes=40, max_group=2)
    program = compile_program(floats(10, 10, 10, 50, 10, packing=packing), topology(1, 1))
    assert [pack.count for pack in program.layout.packs] == [20, 10, 50, 10]
    assert [place.pack for place in program.layout.places] == [0, 0, 1, 2, 3]
    alone = compile_program(floats(3, 3, packing=Packing()), topology(1, 1))
    assert len(alone.layout.packs) == 2


@pytest.mark.parametrize("name", ["nccl", "nccl/xring", "nccl/rechd", "nccl/pscpu"])
def test_an_algorithm_for_gpus_on_cpu_devices_is_unimplemented_and_names_the_device(name: str) -> None:
    with pytest.raises(UnimplementedError, match=f"'{name}' needs GPUs.*/job:worker/replica:0/task:0/device:CPU:0"):
        check(floats(10, all_reduce_spec=(Tier(name),)), topology(1, 1).group)


GPU_GROUPS = [
    (("GPU:0",), ("GPU:0",)),
    (("GPU:0", "GPU:1"),),
    (("GPU:0", "GPU:1"), ("GPU:0",)),
    (("GPU:1", "GPU:0", "GPU:1"), ("GPU:0",), ("GPU:0", "GPU:1", "GPU:2")),
]
SPAN = Span(0, 60)


@pytest.mark.parametrize("workers", GPU_GROUPS)
@pytest.mark.parametrize("operation", [SUM, Reduce(ReduceOp.SUM, 1), Broadcast(1)], ids=str)
def test_the_plans_of_nccl_that_run_are_proved(workers: tuple[tuple[str, ...], ...], operation: Operation) -> None:
    nccl = CommunicationImplementation.NCCL
    gpus = gpu_topology(*workers).gpus
    plans: dict[int, WidePlan] = {}
    for place in range(len(workers)):
        topology = gpu_topology(*workers, me=place)
        (task,) = compile_program(floats(60, operation=operation, implementation=nccl), topology).tasks
        plans |= {gpu: task.plan for gpu, (at, _) in enumerate(gpus) if at == place}
    everybody = range(len(gpus))
    root = gpu_topology(*workers).gpu_number_of(1)
    goal = postconditions.all_reduce_goal(everybody, SPAN)
    if not isinstance(operation, AllReduce):
        reduces = isinstance(operation, Reduce)
        goal = (goals.reduce_goal if reduces else goals.broadcast_goal)(everybody, SPAN, root)
        native = catalog.native_reduce if reduces else catalog.native_broadcast
        beside = {gpu for gpu in plans if gpus[gpu][0] == gpus[root][0]} - {root}  # a worker runs its root's plan
        plans |= {gpu: native(everybody, gpu, SPAN, root) for gpu in beside}
    verify_plans(plans, goal)


@pytest.mark.parametrize("workers", GPU_GROUPS[2:])
@pytest.mark.parametrize("name", ["nccl/xring", "nccl/rechd", "nccl/pscpu"])
def test_the_plans_with_nccl_inside_of_workers_that_run_are_proved(
    workers: tuple[tuple[str, ...], ...], name: str
) -> None:
    hosts = gpu_participants(gpu_topology(*workers))
    plans: dict[int, WidePlan] = {}
    for place, (_, *others) in enumerate(hosts):
        (task,) = compile_program(floats(60, all_reduce_spec=(Tier(name),)), gpu_topology(*workers, me=place)).tasks
        assert task.is_hierarchical == bool(others) and task.peers <= set(range(len(workers)))
        plans |= {place: task.plan} | {other: catalog.all_reduce(name, hosts, other, SPAN) for other in others}
    verify_plans(plans, postconditions.all_reduce_goal([gpu for host in hosts for gpu in host], SPAN))


def test_an_algorithm_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'gossip'"):
        check(floats(10, all_reduce_spec=(Tier("gossip"),)), topology(1, 1).group)


@pytest.mark.parametrize("operation", [Reduce(ReduceOp.SUM, 4), Broadcast(4)], ids=str)
def test_a_root_outside_the_group_is_refused(operation: Operation) -> None:
    with pytest.raises(InvalidArgumentError, match="root 4 .* group of 4: expected 0 to 3"):
        compile_program(floats(10, operation=operation), topology(2, 2))


def test_what_has_no_meaning_for_a_type_is_refused_with_its_path() -> None:
    collective = Collective(SUM, "*", (Leaf("['mask']", DType.BOOL, (3,)),))
    with pytest.raises(UnimplementedError, match=r"\['mask'\]: sum of bool"):
        compile_program(collective, topology(2))


def test_every_worker_makes_the_same_tasks_with_the_same_hashes() -> None:
    made = [compile_program(floats(1000, 7, 3), topology(2, 1, 1, me=me)) for me in range(3)]
    described = [
        [(s.pack_number, s.shard, s.span, s.channel, s.algorithm, s.plan_hash) for s in program.tasks]
        for program in made
    ]
    assert described[0] == described[1] == described[2]


def test_who_contributes_and_who_receives_follows_from_the_operation() -> None:
    def roles(operation: Operation, me: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        program = compile_program(floats(10, operation=operation), topology(2, 2, me=me))
        return program.contributors, program.receivers

    assert roles(SUM, 1) == ((2, 3), (2, 3))
    assert roles(Reduce(ReduceOp.SUM, 3), 1) == ((2, 3), (3,))
    assert roles(Reduce(ReduceOp.SUM, 3), 0) == ((0, 1), ())
    assert roles(Broadcast(3), 0) == ((), (0, 1))
    assert roles(Broadcast(3), 1) == ((3,), (2, 3))


def test_a_barrier_has_one_task_and_delivers_nothing() -> None:
    program = compile_program(Collective(Barrier(), "", ()), topology(2, 2))
    assert len(program.tasks) == 1 and program.tasks[0].peers == {1}
    assert (program.contributors, program.receivers) == ((), ())


def test_tasks_of_one_channel_run_in_order() -> None:
    program = compile_program(floats(*[300] * 20, bytes_per_pack=1), topology(1, 1))
    for channel, queue in program.queues:
        numbers = [(task.pack_number, task.shard) for task in reversed(queue)]
        assert numbers == sorted(numbers) and all(task.channel == channel for task in queue)
    assert len(program.queues) == CHANNELS
    first = [queue[-1].pack_number for _, queue in program.queues]
    assert first == sorted(first)  # the last leaves start first
