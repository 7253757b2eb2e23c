"""What a rank of DDP over `init_process_group("collectived")` is told when another one fails, and how it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.e2e.torch.running import Ended, run_ranks

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")
pytestmark = pytest.mark.timeout(150)

SECONDS = 3  # of the process group's timeout
PROGRAM = f"""
init(seconds={SECONDS})
model = DDP(torch.nn.Linear(8, 8))

def step():
    model(torch.randn(4, 8)).sum().backward()

for _ in range(3):  # in the second one DDP arranges its buckets anew
    step()
dist.barrier()
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


def test_a_rank_that_dies_is_named_with_its_host_and_line(two_workers: Any, tmp_path: Path) -> None:
    survivor, dead = run(two_workers, tmp_path, "os._exit(9)")
    assert dead.status == 9 and survivor.status == 0, survivor.errors
    first, again = survivor.output.splitlines()
    assert first.startswith("UnavailableError: rank 1 (host host1, pid ") and "is lost" in first
    assert "last did barrier() #" in first and "at <string>:" in first
    assert again.startswith("again: rank 1 (host host1")


def test_a_rank_that_stalls_is_named_at_the_timeout(two_workers: Any, tmp_path: Path) -> None:
    waiting, late = run(two_workers, tmp_path, f"time.sleep({SECONDS} + 2)")
    assert (waiting.status, late.status) == (0, 0), waiting.errors + late.errors
    for ended in (waiting, late):
        assert ended.output.startswith("DeadlineExceededError: [collectived] Timed out waiting: all_reduce(sum)")
        assert "rank 1 (host host1, pid " in ended.output and "has not come" in ended.output


@pytest.mark.parametrize(
    ("fail", "says"),
    [
        ("dist.barrier()", "rank 1 differs: the operation is barrier() there, all_reduce(sum) on rank 0"),
        ("dist.all_reduce(torch.ones(3))", "rank 1 differs: the value is float32[3] there, float32[72] on rank 0"),
    ],
    ids=["skips", "differs"],
)
def test_after_a_call_that_differs_training_goes_on(two_workers: Any, tmp_path: Path, fail: str, says: str) -> None:
    for ended in run(two_workers, tmp_path, fail):
        assert ended.status == 0, ended.errors
        lines = ended.output.splitlines()
        assert lines[0].startswith(f"InvalidArgumentError: {says}")
        assert any("rank 1 at <string>:" in line for line in lines)
        assert lines[-1] == "the next step went well"


def test_a_rank_without_resources_ends_no_process(two_workers: Any, tmp_path: Path) -> None:
    """A value that needs memory anew, in a process that can have none."""
    program = f"""
import resource
init(seconds={SECONDS})
dist.barrier()
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


def test_without_a_worker_the_error_says_what_to_type(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    import torch.distributed as dist

    monkeypatch.setenv("COLLECTIVED_WORKER", "unix:/nowhere.sock")
    with pytest.raises(dist.DistBackendError, match="nowhere.sock"):
        dist.init_process_group("collectived", store=dist.HashStore(), rank=0, world_size=1)
