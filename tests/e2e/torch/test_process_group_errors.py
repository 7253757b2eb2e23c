"""What a rank of DDP over `init_process_group("collectived")` is told when another one fails, and how it goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.torch.running import Ended, run_ranks

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")
pytestmark = pytest.mark.timeout(150)

SECONDS = 3  # of the process group's timeout, once all ranks have got going
BEGIN = f"""
def hurry():
    dist.barrier()
    dist.group.WORLD.set_timeout(datetime.timedelta(seconds={SECONDS}))

init()
"""
PROGRAM = f"""
{BEGIN}
layers = [torch.nn.Linear(8, 8) for _ in range(3)]
model = DDP(torch.nn.Sequential(*layers), bucket_cap_mb=72 * 4 / 2**20)  # a bucket for each of them

def step():
    model(torch.randn(4, 8)).sum().backward()

for _ in range(3):  # in the second one DDP arranges its buckets anew
    step()
hurry()
try:
    if rank == 1:
        fail()
    step()
    print("no error")
except dist.DistBackendError as error:
    print(type(error.__cause__).__name__, error, sep=": ")
    try:
        step()
        print("the next step went well")
    except dist.DistBackendError as later:
        print("again:", later)
"""


def run(cluster: Any, tmp_path: Path, fail: str) -> list[Ended]:
    return run_ranks(cluster, tmp_path / "store", 2, f"def fail():\n    {fail}\n{PROGRAM}")


def last_host(cluster: Any) -> str:
    return f"host{len(cluster.workers) - 1}"


def test_a_rank_that_dies_is_named_with_its_host_and_line(cluster: Any, tmp_path: Path) -> None:
    survivor, dead = run(cluster, tmp_path, "os._exit(9)")
    assert dead.status == 9 and survivor.status == 0, survivor.errors
    first, again = survivor.output.splitlines()
    assert first.startswith(f"UnavailableError: rank 1 (host {last_host(cluster)}, pid ") and "is lost" in first
    assert "last did barrier() #" in first and "at <string>:" in first
    assert again.startswith(f"again: rank 1 (host {last_host(cluster)}")


def test_a_rank_that_stalls_is_named_at_the_timeout(cluster: Any, tmp_path: Path) -> None:
    waiting, late = run(cluster, tmp_path, f"time.sleep({SECONDS} + 2)")
    assert (waiting.status, late.status) == (0, 0), waiting.errors + late.errors
    for ended in (waiting, late):
        assert ended.output.startswith("DeadlineExceededError: [collectived] Timed out waiting: all_reduce(sum)")
        assert f"rank 1 (host {last_host(cluster)}, pid " in ended.output and "has not come" in ended.output


@pytest.mark.parametrize(
    ("fail", "says"),
    [
        ("dist.barrier()", "rank 1 differs: the operation is barrier() there, all_reduce(sum) on rank 0"),
        ("dist.all_reduce(torch.ones(3))", "rank 1 differs: the value is float32[3] there, float32[72] on rank 0"),
    ],
    ids=["skips", "differs"],
)
def test_after_a_call_that_differs_training_goes_on(cluster: Any, tmp_path: Path, fail: str, says: str) -> None:
    for ended in run(cluster, tmp_path, fail):
        assert ended.status == 0, ended.errors
        lines = ended.output.splitlines()
        assert lines[0].startswith(f"InvalidArgumentError: {says}")
        assert any("rank 1 at <string>:" in line for line in lines)
        assert lines[-1] == "the next step went well"


@pytest.mark.parametrize(
    "look",
    ["work.is_completed()", "work.is_success()", "work.exception()", "dist.irecv(torch.empty(1))"],
    ids=["completed", "success", "exception", "other-receive"],
)
def test_looking_at_a_failed_work_leaves_the_ranks_in_step(two_workers: Any, tmp_path: Path, look: str) -> None:
    """What rank 0 starts after it has looked is paired with what rank 1 starts without looking."""
    program = f"""
init()
posted = dist.irecv(torch.empty(1)) if rank == 0 else None  # from anybody
work = dist.all_reduce(torch.ones(3 if rank else 4), async_op=True)
if rank == 0:
    time.sleep(1)
    looked = {look}
for one in (work, dist.all_reduce(torch.ones(2), async_op=True)):
    try:
        one.wait()
        print("no error")
    except dist.DistBackendError:
        pass
for value in (100.0, 1000.0):
    mine = torch.full((2,), value)
    dist.all_reduce(mine)
    print(mine.tolist())
"""
    for ended in run_ranks(two_workers, tmp_path / "store", 2, program):
        assert ended.status == 0, ended.errors
        assert ended.output.split("\n") == ["[200.0, 200.0]", "[2000.0, 2000.0]", ""]


def test_a_rank_without_resources_ends_no_process(two_workers: Any, tmp_path: Path) -> None:
    """A value that needs memory anew, in a process that can have none."""
    program = f"""
import resource
{BEGIN}
hurry()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
if rank == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # no memory of the worker can be mapped any more
try:
    dist.all_reduce(torch.ones(50_000_000))
    print("no error")
except dist.DistBackendError as error:
    print(type(error.__cause__).__name__, error)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
"""
    for ended in run_ranks(two_workers, tmp_path / "store", 2, program):
        assert ended.status == 0, ended.errors
        assert ended.output.startswith(("ResourceExhaustedError", "AbortedError", "DeadlineExceededError")), ended


def test_a_rank_without_memory_ends_no_process(cluster: Any, tmp_path: Path) -> None:
    """Out of memory where an operation needs some, and where the caller does."""
    program = f"""
import re, resource
{BEGIN}
hurry()
big, rows = torch.ones(20_000_000), [torch.empty(20_000_000) for _ in range(2)]
limits = resource.getrlimit(resource.RLIMIT_DATA)
if rank == 1:  # half of what an array needs is left
    used = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + big.nbytes // 2, limits[1]))
for number in range(2):
    try:
        dist.all_gather(rows, big) if number else dist.all_reduce(big, async_op=True).wait()
        print("well")
    except (RuntimeError, MemoryError) as error:
        print(type(error.__cause__ or error).__name__, str(error)[:60])
resource.setrlimit(resource.RLIMIT_DATA, limits)
"""
    for ended in run_ranks(cluster, tmp_path / "store", 2, program):
        assert ended.status == 0, ended.errors
        assert "well" not in ended.output.splitlines()[1], ended


def test_what_threads_of_pytorch_submit_is_named_ddp_backward(cluster: Any, tmp_path: Path) -> None:
    """Such threads have no line of the program's: those of callbacks of futures, and of autograd's devices."""
    program = """
import threading
init()
dist.barrier()
submitting = threading.Thread(target=dist.all_reduce, args=(torch.ones(3),))
submitting.start()
submitting.join()
try:
    dist.barrier() if rank == 0 else os._exit(9)
except dist.DistBackendError as error:
    print(error)
"""
    survivor, _ = run_ranks(cluster, tmp_path / "store", 2, program)
    assert re.search(r"rank 1 .* last did all_reduce\(sum\) #\d+ at DDP backward", survivor.output), survivor


def test_without_a_worker_the_error_says_what_to_type(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    import torch.distributed as dist

    import collectived_torch

    collectived_torch.register()  # PyTorch 2.4 reads no entry points
    monkeypatch.setenv("COLLECTIVED_WORKER", "unix:/nowhere.sock")
    with pytest.raises(dist.DistBackendError, match="nowhere.sock"):
        dist.init_process_group("collectived", store=dist.HashStore(), rank=0, world_size=1)
