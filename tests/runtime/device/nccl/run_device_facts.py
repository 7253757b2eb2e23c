"""Plays one rank of some facts: `python -m tests.runtime.device.nccl.run_device_facts BINDING RANK SOCKET FACT…`.

BINDING is one of those of a worker, over the real GPU, or `stand-in`, over fake ones. SOCKET is the descriptor by which
the ranks tell each other how far they are. The last line that it prints is a JSON object: of each fact what went wrong,
or nothing, and what is to be noted; or why the binding could not be loaded.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from typing import Any

from tests.fakes.cuda import FakeCuda
from tests.fakes.nccl import FakeNccl
from tests.runtime.device.nccl.device_facts import RUNS, Rank

from collectived_proto.errors import FailedPreconditionError
from collectived_runtime.device.cuda.driver import Cuda
from collectived_runtime.device.nccl.binding import load_binding
from collectived_runtime.device.nccl.interface import Nccl


def opened(binding: str) -> tuple[Cuda, Nccl]:
    if binding.startswith("stand-in"):
        fake = FakeCuda()
        return fake, FakeNccl(cuda=fake, blocking=binding.endswith("that blocks"))
    from collectived_runtime.device.cuda.driver_cuda import DriverCuda

    return DriverCuda(), load_binding(binding)


def main(binding: str, rank: int, peer: socket.socket, titles: list[str]) -> dict[str, Any]:
    try:
        cuda, nccl = opened(binding)
    except FailedPreconditionError as error:
        return {"missing": str(error)}
    one = Rank(cuda, nccl, rank, peer)
    found: dict[str, Any] = {}
    for fact in (fact for run in RUNS for fact in run if fact.__name__ in titles):
        one.notes.clear()
        try:
            fact(one)
            found[fact.__name__] = {"wrong": "", "notes": list(one.notes)}
        except Exception:
            found[fact.__name__] = {"wrong": traceback.format_exc(), "notes": list(one.notes)}
            break  # the ranks are no longer at the same point
    return found


if __name__ == "__main__":
    name, number, descriptor, *facts = sys.argv[1:]
    told = json.dumps(main(name, int(number), socket.socket(fileno=int(descriptor)), facts))
    print(told, flush=True)
    os._exit(0)  # threads that hang in NCCL may hang forever
