"""Programs of PyTorch as ranks: processes with a store in a file, as torch.distributed wants one."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tests.e2e.conftest import Cluster

_WITHIN = 100  # seconds
VERSION = tuple(map(int, version("torch").split(".")[:2])) if find_spec("torch") else ()
REGISTER = """
import torch.distributed as dist
if not hasattr(dist.Backend, "COLLECTIVED"):  # PyTorch 2.4 reads no entry points
    import collectived_torch
    collectived_torch.register()
"""
BEGIN = f"""
import datetime, os, sys, time
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

assert "collectived" not in sys.modules
{REGISTER}
torch.set_num_threads(1)
STORE = "file://" + sys.stdin.readline().strip()
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def init(backend="collectived", seconds=60, store=STORE):
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=seconds)
    )
"""


class Ended(NamedTuple):
    status: int
    output: str
    errors: str


def run_ranks(cluster: Cluster, store: Path, ranks: int, program: str) -> list[Ended]:
    """Runs `program`, to which `init` is known, as that many ranks over the workers; how each ended."""
    clients = [cluster.fresh_client(rank, ranks, "unused", BEGIN + program) for rank in range(ranks)]
    try:
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(f"{store}\n")
            client.stdin.flush()
        return [Ended(0, *client.communicate(timeout=_WITHIN))._replace(status=client.returncode) for client in clients]
    finally:
        for client in clients:
            client.kill()
            client.wait()


def run_well(cluster: Cluster, store: Path, ranks: int, program: str) -> list[str]:
    """The same of a program that is to succeed on every rank; what each printed."""
    ended = run_ranks(cluster, store, ranks, program)
    for rank, (status, _, errors) in enumerate(ended):
        assert status == 0, f"rank {rank}:\n{errors}"
    return [output for _, output, _ in ended]
