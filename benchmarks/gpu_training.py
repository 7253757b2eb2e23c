"""`python -m benchmarks.gpu_training`: data-parallel training on one GPU, by collectived and by PyTorch's NCCL backend.

Two processes train the same small network from the same seeds by DistributedDataParallel: over PyTorch's own backend of
NCCL, which takes them for two hosts; over `init_process_group("cpu:collectived,cuda:collectived")`; and over Gloo with
`allreduce_hook`. Then the loss curves are compared, and the weights of both ranks.

Both ranks must have the same bits. The curves are expected to be the same bits too: a sum of two values does not depend
on their order, and whether they are halved before or after makes no difference. They may differ by `TOLERANCE`, for
libraries may choose other kernels in another process. Without a GPU it ends with status 1. To try the program itself,
`--device cpu` trains on the CPU, with Gloo in place of NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import conditions
from benchmarks.crew import free_ports
from benchmarks.environments import ROOT
from benchmarks.gpu_teams import as_host, workers
from benchmarks.gpus import find_obstacle
from benchmarks.page import write
from benchmarks.tables import duration
from collectived.testing.daemon import Daemon

PEER, GROUP, HOOK = "PyTorch alone", "process group", "hook"
NAMES = (PEER, GROUP, HOOK)
TOLERANCE = 1e-5  # of a loss, relative
RANKS = 2
STEPS = 300
WIDTH, BATCH, CLASSES, BUCKET_MIB = 512, 64, 10, 0.5
_SECONDS = 60.0  # for the processes of one contestant
_LIMIT = 30.0  # seconds for a collective
_WARMUP = 20  # steps that are not timed


@dataclass(frozen=True)
class Training:
    """The result of a rank: its loss at every step, seconds of a step, and a digest of its weights at the end."""

    losses: list[float]
    seconds: float
    weights: str


Trainings = Mapping[str, Sequence[Training]]  # by name, of each rank


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_training", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--hook-backend", choices=("gloo", "nccl"), default="gloo", help="of DDP, beside the hook")
    parser.add_argument("--out", type=Path, metavar="FILE", help="losses and times as JSON")
    parser.add_argument("--write", action="store_true", help="put the table into docs/internals/performance.md")
    parser.add_argument("--rank", choices=NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(
            "found",
            json.dumps(asdict(train(options.rank, options.device, options.steps, options.hook_backend))),
            flush=True,
        )
        return 0
    if options.device == "cuda" and (why := find_obstacle()):
        print(f"no GPU can be trained on: {why}", file=sys.stderr)
        return 1
    found: dict[str, list[Training]] = {}
    failures = []
    for name in NAMES:
        try:
            found[name] = run(name, options.device, options.steps, options.hook_backend)
        except Exception as error:
            failures.append(f"{name}: {error}")
    faults = compare(found)
    heading = conditions.shown(_versions())
    text = report(found, heading, failures + faults)
    print(text)
    if options.out:
        shown = {name: [asdict(one) for one in ranks] for name, ranks in found.items()}
        whole = {"conditions": heading, "trainings": shown, "failures": failures + faults}
        options.out.write_text(json.dumps(whole, indent=1))
    if options.write:
        write("gpu training", text)
    return int(bool(failures or faults))


def run(name: str, device: str, steps: int, hook_backend: str = "gloo") -> list[Training]:
    """One contestant's training, by rank.

    Raises:
        RuntimeError: a rank has failed, or has not ended in time; all of them are ended.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_training", "--rank", name, "--device", device]
    command += ["--steps", str(steps), "--hook-backend", hook_backend]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    shared = {**os.environ, "PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1))}
    shared |= {"WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    shared["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else sums of products are not the same every time
    with contextlib.ExitStack() as stack:
        if name != PEER:
            (address,), _ = stack.enter_context(workers(Daemon, 1))
            shared |= {"COLLECTIVED_WORKER": address, "COLLECTIVED_JOB": "bench"}
            shared["COLLECTIVED_GROUP"] = f"training-{secrets.token_hex(3)}"
        running = []
        for rank in range(RANKS):
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            variables = {**shared, **as_host(rank), "RANK": str(rank)}
            process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            running.append((process, output))
        end = time.monotonic() + _SECONDS
        for rank, (process, output) in enumerate(running):
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"rank {rank} did not end within {_SECONDS:g} s: {_last_words(output)}") from None
            if process.returncode:
                raise RuntimeError(f"rank {rank} ended with status {process.returncode}: {_last_words(output)}")
        return [parse(_read(output)) for _, output in running]


def parse(output: str) -> Training:
    """The line of a rank at its end. Pure."""
    (line,) = [line for line in output.splitlines() if line.startswith("found ")]
    return Training(**json.loads(line.removeprefix("found ")))


def compare(found: Trainings) -> list[str]:
    """The errors: ranks with other weights, and curves that differ by more than `TOLERANCE`. Pure."""
    faults = []
    for name, ranks in found.items():
        if len({one.weights for one in ranks}) > 1:
            faults.append(f"{name}: the weights are not the same bits on all ranks")
        if not all(one.losses[-1] < one.losses[0] / 2 for one in ranks):
            faults.append(f"{name}: nothing was learned, the loss of rank 0 went from {_ends(ranks[0])}")
    for name in (name for name in found if name != PEER and PEER in found):
        largest = difference(found[name], found[PEER])
        if not largest <= TOLERANCE:
            faults.append(f"{name}: a loss differs from that of {PEER} by {largest:.1e}, more than {TOLERANCE:g}")
    return faults


def difference(ours: Sequence[Training], theirs: Sequence[Training]) -> float:
    """By how much, relative, losses of any rank and step differ at most; inf where one is no number. Pure."""
    pairs = [
        (a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one.losses, other.losses, strict=True)
    ]
    found = [abs(a - b) / abs(b) if a != b else 0.0 for a, b in pairs]
    return math.inf if any(map(math.isnan, found)) else max(found)


def report(found: Trainings, heading: str, faults: Sequence[str]) -> str:
    """The text that is printed, and written into the page. Pure."""
    rows = ["| by | a step | loss | largest difference of a loss | weights |", "|---|---:|---|---|---|"]
    for name, ranks in found.items():
        same = "the same bits" if PEER in found and ranks[0].weights == found[PEER][0].weights else "others"
        largest = difference(ranks, found[PEER]) if PEER in found else None
        beside = "" if name == PEER or largest is None else f"{largest:.1e}" if largest else "none"
        seconds = duration(max(one.seconds for one in ranks))
        rows.append(
            f"| {name} | {seconds} | {_ends(ranks[0])} | {beside} | {'' if name == PEER or not beside else same} |"
        )
    return "\n\n".join([heading, *(f"**Failed**: {fault}." for fault in faults), "\n".join(rows)])


def _ends(training: Training) -> str:
    return f"{training.losses[0]:.4f} to {training.losses[-1]:.4f}"


def train(name: str, device_type: str, steps: int, hook_backend: str) -> Training:
    """One rank of a contestant."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # so that CUDA is in use when a process group asks for the GPU
    ours = "cpu:collectived,cuda:collectived"
    backend = {PEER: "nccl" if device_type == "cuda" else "gloo", GROUP: ours, HOOK: hook_backend}[name]
    dist.init_process_group(backend, timeout=timedelta(seconds=_LIMIT))
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()),
            torch.nn.Linear(WIDTH, CLASSES),
        ).to(device)
        model: Any = DistributedDataParallel(network, bucket_cap_mb=BUCKET_MIB)
        if name == HOOK:
            model.register_comm_hook(None, _make_hook(stack, device_type))
        losses, times = _steps(torch, model, device, steps)
        weights = torch.nn.utils.parameters_to_vector(network.parameters()).detach().cpu().numpy()
        if device_type == "cuda":
            torch.cuda.synchronize()
        return Training(losses, statistics.median(times), hashlib.sha256(weights.tobytes()).hexdigest())


def _make_hook(stack: contextlib.ExitStack, device_type: str) -> Any:
    import collectived as cd
    from collectived.integrations.torch import allreduce_hook

    session = stack.enter_context(cd.connect())
    options = cd.CommunicationOptions(timeout_seconds=_LIMIT)
    device = "GPU:0" if device_type == "cuda" else None
    return allreduce_hook(stack.enter_context(session.join(device=device, options=options, timeout=_LIMIT)))


def _steps(torch: Any, model: Any, device: Any, steps: int) -> tuple[list[float], list[float]]:
    """The loss of every step, and the seconds of those that are timed; the loss comes to the host in each."""
    rank = int(os.environ["RANK"])
    teacher = torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(16 * BATCH, WIDTH, generator=torch.Generator().manual_seed(2 + rank))
    labels = (inputs @ teacher).argmax(dim=1)  # made on the host, so that every contestant has the same
    inputs, labels = inputs.to(device), labels.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, times = [], []
    for step in range(steps):
        began = time.perf_counter()
        first = step * BATCH % len(inputs)
        loss = torch.nn.functional.cross_entropy(model(inputs[first : first + BATCH]), labels[first : first + BATCH])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()))
        if step >= min(_WARMUP, steps - 1):
            times.append(time.perf_counter() - began)
    return losses, times


def _read(output: Any) -> str:
    output.seek(0)
    return str(output.read())


def _last_words(output: Any) -> str:
    lines = _read(output).strip().splitlines()
    return " / ".join(lines[-3:]) or "it said nothing"


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "cupy-cuda13x", "nvidia-nccl-cu13"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    with contextlib.suppress(Exception):
        import torch

        found["GPU"] = torch.cuda.get_device_name(0)
    return found


if __name__ == "__main__":
    sys.exit(main())
