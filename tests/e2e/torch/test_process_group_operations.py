"""Operations of `init_process_group("collectived")` keep c10d's semantics, on one host and on two."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.torch.running import BEGIN, VERSION, run_well

pytest.importorskip("torch", reason="torch is not installed: make test-torch")
pytestmark = pytest.mark.timeout(150)


def check(cluster: Any, tmp_path: Path, body: str, ranks: int = 3) -> None:
    """Runs `body` on every rank between init and destroy."""
    run_well(cluster, tmp_path / "store", ranks, f"init()\n{body}\ndist.destroy_process_group()\n")


REDUCTIONS = """
total = size * (size + 1) // 2
for dtype in (torch.int8, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
    t = torch.full((3,), rank + 1).to(dtype)
    dist.all_reduce(t)
    assert t.dtype is dtype and (t == total).all(), t
t = torch.tensor([rank == 0, True, False])
for op, expected in ((dist.ReduceOp.SUM, [True, True, False]), (dist.ReduceOp.PRODUCT, [False, True, False]),
                     (dist.ReduceOp.MIN, [False, True, False]), (dist.ReduceOp.MAX, [True, True, False])):
    own = t.clone()
    dist.all_reduce(own, op)
    assert own.dtype is torch.bool and own.tolist() == expected, (op, own)
t = torch.tensor([1 << rank])
dist.all_reduce(t, dist.ReduceOp.BOR)
assert t.item() == (1 << size) - 1
t = torch.tensor([-rank * 7])
dist.all_reduce(t, dist.ReduceOp.AVG)
assert t.item() == (-7 * sum(range(size))) // size
t = torch.full((2,), float(rank))
dist.all_reduce(t, dist.ReduceOp.AVG)
assert t.tolist() == [(size - 1) / 2] * 2
t = torch.arange(8.0).reshape(2, 4).t()[::2] * (rank + 1)
strided = torch.zeros(4, 4).t()[::2, :2].copy_(t)
dist.all_reduce(strided)
assert torch.equal(strided, torch.arange(8.0).reshape(2, 4).t()[::2] * total)
scalar, empty = torch.tensor(1.5), torch.empty(0)
dist.all_reduce(scalar)
dist.all_reduce(empty)
assert scalar == 1.5 * size
own = torch.full((2,), float(rank + 1))
dist.reduce(own, 1, dist.ReduceOp.PRODUCT)
if rank == 1:
    assert own.tolist() == [6.0, 6.0]
many = [torch.ones(2), torch.ones(3, 2)]
dist.all_reduce_coalesced(many)
assert all((one == size).all() for one in many)
sparse = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (5,), check_invariants=True)
dist.all_reduce(sparse)
assert sparse.to_dense().tolist() == [1.0] * 3 + [2.0 * size, 0.0]
sparse = torch.sparse_coo_tensor([[rank, 3]], [3.0, 1.0], (5,), check_invariants=True)
dist.all_reduce(sparse, dist.ReduceOp.AVG)
assert sparse.to_dense().tolist() == [1.0] * 3 + [1.0, 0.0]
for dtype, most in ((torch.int64, 2**60), (torch.uint8, 200)):
    sparse = torch.sparse_coo_tensor([[rank, 3]], torch.tensor([7, most]).to(dtype), (5,), check_invariants=True)
    dist.all_reduce(sparse, dist.ReduceOp.AVG)
    assert sparse.dtype is dtype and sparse.to_dense().tolist() == [2] * 3 + [most, 0]
t, one = torch.tensor([200], dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
dist.all_reduce(t, dist.ReduceOp.AVG)
dist.reduce(t, 0, dist.ReduceOp.AVG)
dist.reduce_scatter_tensor(one, t.repeat(size), dist.ReduceOp.AVG)
assert t.tolist() == one.tolist() == [200]
t = torch.tensor([[-rank, 1], [2, rank]], dtype=torch.int16).t()
dist.all_reduce(t, dist.ReduceOp.AVG)
assert t.tolist() == [[-1, 2], [1, 1]]
from torch._C import _distributed_c10d as c10d
if hasattr(c10d, "_make_nccl_premul_sum"):
    t = torch.ones(2)
    dist.all_reduce(t, c10d._make_nccl_premul_sum(0.5))
    assert t.tolist() == [0.5 * size] * 2
    sparse = torch.sparse_coo_tensor([[3]], [1.0], (5,), check_invariants=True)
    dist.all_reduce(sparse, c10d._make_nccl_premul_sum(0.5))
    assert sparse.to_dense()[3] == 0.5 * size
for wrong, error in ((lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e4m3fn)), TypeError),
                     (lambda: dist.all_reduce_coalesced([torch.ones(1), torch.ones(1, dtype=torch.int8)]), Exception)):
    try:
        wrong()
        raise SystemExit("it was not refused")
    except error:
        pass
"""


def test_reductions_of_every_dtype_layout_and_op(cluster: Any, tmp_path: Path) -> None:
    check(cluster, tmp_path, REDUCTIONS)


GATHERS = """
outs = [torch.empty(other + 1) for other in range(size)]  # uneven
dist.all_gather(outs, torch.full((rank + 1,), float(rank)))
assert [out.tolist() for out in outs] == [[float(other)] * (other + 1) for other in range(size)]
outs = [torch.empty(other) for other in range(size)]  # of no elements on rank 0
dist.all_gather(outs, torch.full((rank,), float(rank)))
assert [out.tolist() for out in outs] == [[float(other)] * other for other in range(size)]
whole = torch.empty(size * 2, 2)
dist.all_gather_into_tensor(whole, torch.full((2, 2), float(rank)))
assert whole[:, 0].tolist() == [float(other) for other in range(size) for _ in range(2)]
f8 = torch.full((2,), rank).to(torch.float8_e4m3fn)
outs = [torch.empty_like(f8) for _ in range(size)]
dist.all_gather(outs, f8)
assert [out.float().tolist() for out in outs] == [[float(other)] * 2 for other in range(size)]
outs = [torch.empty(2, 2).t() for _ in range(size)] if rank == 1 else None
dist.gather(torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * rank, outs, dst=1)
if rank == 1:
    assert [out.tolist() for out in outs] == [[[1.0 * r, 2.0 * r], [3.0 * r, 4.0 * r]] for r in range(size)]
out = torch.empty(2, dtype=torch.bfloat16)
dist.scatter(out, [torch.full((2,), r).bfloat16() for r in range(size)] if rank == 2 else None, src=2)
assert out.tolist() == [float(rank)] * 2
out = torch.empty(rank + 1)
dist.reduce_scatter(out, [torch.full((r + 1,), float(r)) for r in range(size)])
assert out.tolist() == [float(rank * size)] * (rank + 1)
out = torch.empty(2, dtype=torch.int64)
dist.reduce_scatter_tensor(out, torch.arange(2 * size), dist.ReduceOp.AVG)
assert out.tolist() == [2 * rank, 2 * rank + 1]
out = torch.empty(sum(range(1, size + 1)), 2)
rows = [r + 1 for r in range(size)]
dist.all_to_all_single(out, torch.full((size * (rank + 1), 2), float(rank)), rows, [rank + 1] * size)
assert out[:, 0].tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
outs = [torch.empty(r + 1) for r in range(size)]
dist.all_to_all(outs, [torch.full((rank + 1,), float(rank)) for _ in range(size)])
assert [one.tolist() for one in outs] == [[float(r)] * (r + 1) for r in range(size)]
try:
    dist.all_to_all_single(torch.empty(size), torch.empty(size + 1))
    raise SystemExit("rows that do not divide were not refused")
except ValueError:
    pass
t = torch.full((2, 3), float(rank)).t()
dist.broadcast(t, 1)
assert t.shape == (3, 2) and (t == 1).all()
found = [None] * size
dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
assert [one["rank"] for one in found] == list(range(size))
box = [{"a": 1}] if rank == 0 else [None]
dist.broadcast_object_list(box)
assert box == [{"a": 1}]
dist.barrier()
dist.group.WORLD.monitored_barrier(datetime.timedelta(seconds=20))
"""


def test_gathers_scatters_and_objects(cluster: Any, tmp_path: Path) -> None:
    check(cluster, tmp_path, GATHERS)


MISFITS = """
own = torch.full(([2, 4, 3][rank],), float(rank))
for rooms in ([3, 3, 3], [2, 3, 4]):  # 9 elements, as there are
    outs = [torch.zeros(room) for room in rooms]
    try:
        dist.all_gather(outs, own)
        raise SystemExit("it was not refused")
    except (ValueError, dist.DistBackendError):
        pass
    try:
        dist.gather(own, outs if rank == 0 else None)
        assert rank != 0, "it was not refused"
    except ValueError as error:
        assert "gave" in str(error), error
mixed, rows = (3, 1, 2), [2, 2, 2]  # of rank 2 alone there is room for its own part
for number, call in enumerate((
    lambda: dist.all_to_all([torch.zeros(room) for room in mixed], [torch.ones(2) for _ in range(size)]),
    lambda: dist.all_to_all_single(torch.zeros(6), torch.ones(6), list(mixed), rows),
    lambda: dist.all_to_all_single(torch.zeros(6), torch.ones(6), [3, 3, 3], rows),
    lambda: dist.all_reduce_coalesced([]),
)):
    try:
        call()
        assert rank == 2 and number < 2, "it was not refused"
    except ValueError:
        pass
t = torch.ones(1)
dist.all_reduce(t)  # the ranks are in step
assert t.item() == size
"""


def test_outputs_that_do_not_fit_what_ranks_give_are_refused(cluster: Any, tmp_path: Path) -> None:
    check(cluster, tmp_path, MISFITS)


FORMS = """
world, minute = dist.group.WORLD, datetime.timedelta(minutes=1)
def ranked():
    return torch.full((2,), float(rank))
def values(*wanted):
    return [one[0].item() for one in wanted]
for more in (dict(opts=1), dict(root=1), dict(root=1, timeout=minute)):
    t = ranked()
    world.broadcast(t, **more).wait()
    assert values(t) == [1]
t, u, v = ranked(), ranked(), ranked()
world.broadcast(t, 2).wait()
world.allreduce([u], op=dist.ReduceOp.MAX).wait()
world.allreduce(v, dist.ReduceOp.MAX, minute).wait()
assert values(t, u, v) == [2, 2, 2]
t = ranked()
world.reduce(t, 0, dist.ReduceOp.SUM).wait()
assert rank or values(t) == [3]
world.barrier(timeout=minute).wait()
world.barrier(minute).wait()
outs = [torch.zeros(2) for _ in range(size)]
world.allgather(outs, ranked()).wait()
assert values(*outs) == [0, 1, 2]
outs = [torch.zeros(2) for _ in range(size)] if rank == 1 else []
world.gather(outs, ranked(), 1).wait()
assert rank != 1 or values(*outs) == [0, 1, 2]
t = torch.zeros(2)
world.scatter(t, [torch.full((2,), 5.0 + other) for other in range(size)] if rank == 1 else [], 1).wait()
assert values(t) == [5 + rank]
world.reduce_scatter(t, [ranked() for _ in range(size)], dist.ReduceOp.SUM).wait()
assert values(t) == [3]
"""


def test_methods_of_a_process_group_take_the_forms_of_c10d(cluster: Any, tmp_path: Path) -> None:
    check(cluster, tmp_path, FORMS)


POINT_TO_POINT = """
right, left = (rank + 1) % size, (rank - 1) % size
posted = [torch.empty(2) for _ in range(100)]
works = [dist.irecv(out, left) for out in posted]  # before anybody sends
works += [dist.isend(torch.full((2,), float(number)), right) for number in range(100)]
for work in works:
    work.wait()
assert [int(out[0]) for out in posted] == list(range(100))
out = torch.empty(2, 2).t()
if rank == 0:
    dist.send(torch.arange(4.0).reshape(2, 2), 1, tag=5)
if rank == 1:
    assert dist.recv(out, 0, tag=5) == 0 and out.tolist() == [[0.0, 1.0], [2.0, 3.0]]
dist.barrier()
if rank == 0:
    seen = []
    for _ in range(2 * (size - 1)):  # two from each, from whoever comes first
        out = torch.empty(1, dtype=torch.int64)
        source = dist.recv(out)
        assert out.item() == source
        seen.append(source)
    assert sorted(seen) == sorted(2 * list(range(1, size)))
    dist.barrier()
    dist.recv(out, 1)  # what is posted for any source serves one that is named
    assert out.item() == 41
else:
    for _ in range(2):
        dist.send(torch.tensor([rank]), 0)
    dist.barrier()
    if rank == 1:
        dist.send(torch.tensor([41]), 0)
dist.barrier()
ops = [dist.P2POp(dist.irecv, torch.empty(3), left), dist.P2POp(dist.isend, torch.full((3,), float(rank)), right)]
for work in dist.batch_isend_irecv(ops):
    work.wait()
assert ops[0].tensor.tolist() == [float(left)] * 3
dist.barrier()
"""


def test_point_to_point_with_many_posted_receives_and_any_source(cluster: Any, tmp_path: Path) -> None:
    check(cluster, tmp_path, POINT_TO_POINT)


GROUPS = """
pair = dist.new_group([0, 2])
if rank != 1:
    t = torch.ones(1)
    dist.all_reduce(t, group=pair)
    assert t.item() == 2 and dist.get_rank(pair) == rank // 2
part, _ = dist.new_subgroups(1)
t = torch.ones(2)
dist.all_reduce(t, group=part)
assert t.tolist() == [1.0, 1.0]
world = dist.group.WORLD
half = world.split_group([0, 1] if rank < 2 else [2], group_name=f"half-{rank // 2}")
t = torch.ones(1)
half.allreduce([t]).wait()
assert half.size() == t.item() == (2 if rank < 2 else 1)
half.shutdown()
for lists in ([[0, 1, 2], [0, 1], [0, 2]], [[0, 1, 2], [0, 2, 1], [0, 1, 2]], [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3]]):
    try:
        world.split_group(lists[rank])
        raise SystemExit("lists that differ were not refused")
    except dist.DistBackendError as error:
        assert "differ" in str(error), error
from torch.distributed.device_mesh import init_device_mesh
try:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
except ImportError:  # PyTorch 2.4
    from torch.distributed._tensor import Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"))
t = torch.ones(1)
dist.all_reduce(t, group=mesh.get_group("a"))
assert t.item() == size
flat = init_device_mesh("cpu", (size,))
spread = distribute_tensor(torch.arange(12.0).reshape(6, 2), flat, [Shard(0)])
assert spread.redistribute(flat, [Replicate()]).to_local().sum() == 66 and spread.sum().full_tensor() == 66
import torch.distributed._functional_collectives as functional
world = dist.group.WORLD
compiled = torch.compile(lambda x: functional.all_reduce(x * 2, "sum", world) + 1, backend="aot_eager", fullgraph=True)
assert compiled(torch.ones(3)).tolist() == [2.0 * size + 1] * 3
summed = functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", world))
assert summed.tolist() == [float(size)] * 3
for batch in torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, num_workers=1):  # forks
    dist.all_reduce(batch)
works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(200)]
assert all(work.wait() and work.is_completed() and work.is_success() for work in works)
future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
assert future.then(lambda done: done.value()[0] * 2).wait().item() == 2 * size
assert dist.get_backend() == "collectived"
dist.destroy_process_group()
init("cpu:collectived")  # again, with the same store
t = torch.ones(1)
dist.all_reduce(t)
assert t.item() == size
"""


def test_groups_meshes_compiled_collectives_futures_and_a_second_init(cluster: Any, tmp_path: Path) -> None:
    check(cluster, tmp_path, GROUPS)


AFTERWARDS = """
init()
world = dist.group.WORLD
dist.destroy_process_group()
try:
    world.allreduce([torch.ones(1)])
except dist.DistBackendError as error:
    print(error)
"""


@pytest.mark.skipif(VERSION < (2, 7), reason="destroy_process_group tells NCCL alone, up to torch 2.6")
def test_a_destroyed_group_says_so(cluster: Any, tmp_path: Path) -> None:
    for output in run_well(cluster, tmp_path / "store", 2, AFTERWARDS):
        assert output == "this process group was destroyed: call init_process_group or new_group again\n"


ABORTED = """
init()
try:
    if rank == 0:
        dist.group.WORLD.abort()
    dist.barrier()
except dist.DistBackendError as error:
    print(error)
"""


def test_an_aborted_group_says_who_did_it(cluster: Any, tmp_path: Path) -> None:
    for output in run_well(cluster, tmp_path / "store", 2, ABORTED):
        assert "rank 0 aborted the process group" in output


DROPPED = """
import threading
from collectived.integrations.c10d import submission
init()
world = dist.group.WORLD
if rank == 0:
    thread = threading.Timer(0.5, dist.distributed_c10d._abort_process_group)
    thread.start()
try:
    while True:  # until rank 0, which waits most of the time, has aborted
        time.sleep(rank)
        world.barrier().wait()
except dist.DistBackendError as error:
    print(error)
if rank == 0:
    thread.join()
else:
    dist.destroy_process_group()
assert submission._shared_session._session is None and submission._shared_session._users == 0
init()
t = torch.ones(1)
dist.all_reduce(t)
assert t.item() == size and submission._shared_session._users == 1
dist.destroy_process_group()
assert submission._shared_session._session is None and submission._shared_session._users == 0
"""


@pytest.mark.skipif(not VERSION or VERSION < (2, 7), reason="PyTorch aborts NCCL alone, up to torch 2.6")
def test_an_aborted_process_group_leaves_and_gives_its_session_back(two_workers: Any, tmp_path: Path) -> None:
    for output in run_well(two_workers, tmp_path / "store", 2, DROPPED):
        assert "rank 0 aborted the process group" in output


OPEN = """
init()
if rank == 0:
    received = [dist.irecv(torch.empty(1), 1), dist.irecv(torch.empty(1))]
    began = time.monotonic()
    if {collective}:
        reduced = dist.all_reduce(torch.ones(1), async_op=True)
    dist.destroy_process_group()
    print(time.monotonic() - began)
else:
    sys.stdin.readline()  # until rank 0 has ended
"""


@pytest.mark.skipif(not VERSION or VERSION < (2, 7), reason="destroy_process_group tells NCCL alone, up to torch 2.6")
@pytest.mark.parametrize("collective", [False, True], ids=["receives", "a-collective-too"])
def test_destroying_a_process_group_does_not_wait_for_who_never_comes(
    two_workers: Any, collective: bool, tmp_path: Path
) -> None:
    program = BEGIN + OPEN.format(collective=collective)
    with contextlib.ExitStack() as running:
        first, second = (
            running.enter_context(two_workers.fresh_client(rank, 2, "unused", program)) for rank in range(2)
        )
        running.callback(second.kill)
        for client in (first, second):
            client.stdin.write(f"{tmp_path}/store\n")
            client.stdin.flush()
        output, errors = first.communicate(timeout=50)  # of the 60 seconds that operations have
        assert first.returncode == 0, errors
        assert collective or float(output) < 5, output
        second.communicate("\n", timeout=50)
