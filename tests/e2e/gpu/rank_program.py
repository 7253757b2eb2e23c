"""A rank in a process of its own, which a test kills.

It sums once, says `ready`, and does what it is told on its standard input: `loop` (it sums until it fails), `hold` (its
GPU never comes to the end of what writes its value; it has called, and says `held`). It ends with its input.
"""

from __future__ import annotations

import sys

import numpy as np
from tests.e2e.gpu.cluster import filled
from tests.e2e.gpu.gates import Gates
from tests.e2e.gpu.own_array import OwnArray
from tests.fakes.client_cuda import FakeClientCuda

import collectived as cd
from collectived.gpu import driver


def main(real: bool, name: str, size: int, count: int) -> None:
    """As rank 0 of a group of that name, with arrays of `count` numbers: of its own, and of its session."""
    if not real:
        driver.set_cuda(FakeClientCuda())
    gates = Gates()
    session = cd.connect()
    group = session.join(name, size, rank=0, device="GPU:0", timeout=60)
    own, lent = OwnArray(np.ones(count, np.float32)), filled(session, np.ones(count, np.float32))
    group.all_reduce("sum", [own, lent])
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "loop\n":
            while True:
                group.all_reduce("sum", [own, lent])
        own.stream = driver.get_cuda().create_stream(0)
        with gates.closed(own.stream):
            work = group.all_reduce("sum", [own, lent], async_op=True)
            print("held", flush=True)
            sys.stdin.read()
            del work
