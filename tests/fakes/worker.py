"""A worker whose GPUs are fake: `python -m tests.fakes.worker worker …`, else as `python -m collectived_runtime`.

COLLECTIVED_FAKE_GPUS says how many; COLLECTIVED_FAKE_HOLD and COLLECTIVED_FAKE_BROKEN name the files of `FakeCuda`,
COLLECTIVED_FAKE_INIT_HOLD, COLLECTIVED_FAKE_ABORT_HOLD, COLLECTIVED_FAKE_NCCL_BROKEN and COLLECTIVED_FAKE_NCCL_CALLS
those of `FakeNccl`.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from tests.fakes.cuda import FakeCuda
from tests.fakes.nccl import FakeNccl

from collectived_runtime import __main__ as daemons
from collectived_runtime.worker import server


def fake_cuda() -> FakeCuda:
    environment = os.environ
    hold, broken = file("HOLD"), file("BROKEN")
    count = int(environment.get("COLLECTIVED_FAKE_GPUS", "1"))
    return FakeCuda(count, hold, broken)


def fake_nccl(cuda: FakeCuda, _: str) -> FakeNccl:
    broken, calls = file("NCCL_BROKEN"), file("NCCL_CALLS")
    return FakeNccl(file("INIT_HOLD"), file("ABORT_HOLD"), cuda=cuda, broken_by=broken, calls_in=calls)


def file(name: str) -> Path | None:
    found = os.environ.get(f"COLLECTIVED_FAKE_{name}")
    return Path(found) if found else None


def main(arguments: list[str] | None = None) -> None:
    """Run what the arguments say; as None, those of the command line."""
    cuda = fake_cuda()
    nccl = functools.partial(fake_nccl, cuda)
    daemons.main(arguments, serve_worker=functools.partial(server.serve, cuda=lambda: cuda, nccl=nccl))


if __name__ == "__main__":
    main()
