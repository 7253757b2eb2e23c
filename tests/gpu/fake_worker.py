"""A worker whose GPUs are fake: `python -m tests.gpu.fake_worker worker …`, else as `python -m collectived_runtime`.

COLLECTIVED_FAKE_GPUS says how many; COLLECTIVED_FAKE_HOLD and COLLECTIVED_FAKE_BROKEN name the files of `FakeCuda`.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from tests.gpu.fake_cuda import FakeCuda

from collectived_runtime import __main__ as daemons
from collectived_runtime.worker import server


def fake_cuda() -> FakeCuda:
    environment = os.environ
    hold, broken = (environment.get(f"COLLECTIVED_FAKE_{name}") for name in ("HOLD", "BROKEN"))
    count = int(environment.get("COLLECTIVED_FAKE_GPUS", "1"))
    return FakeCuda(count, Path(hold) if hold else None, Path(broken) if broken else None)


if __name__ == "__main__":
    daemons.main(serve_worker=functools.partial(server.serve, cuda=fake_cuda))
