"""Who is without descriptors for one call is told of the limit, and no sum is of different steps.

On two workers: ranks of one worker need no descriptors from call to call.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

STEPS = """
import json, resource
import numpy as np
import collectived as cd

limits = resource.getrlimit(resource.RLIMIT_NOFILE)
totals, told = [], []
with cd.connect() as session, session.join(timeout=30) as group:
    group.barrier()
    value = session.empty(1 << 21) if OWN else np.empty(1 << 21)
    for step in range(3):
        if step == STARVED and group.rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        while True:
            value[:] = 10.0**step * (group.rank + 1)
            try:
                total = group.all_reduce("sum", value if step == STARVED else value[:8], timeout=30)[0]
                break
            except cd.errors.CollectiveError as error:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                told.append([type(error).__name__, "RLIMIT_NOFILE is 3" in str(error)])
                if error.verdict is not None:
                    total = -1.0
                    break  # the others hear of it; else this rank is where it was, and tries again
        totals.append(float(total))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    if totals[-1] < 0:
        group.rejoin(timeout=30)
    totals.append(float(group.all_reduce("sum", 1.0)))
print(json.dumps([totals, told]))
"""


@pytest.mark.parametrize(
    ("own", "starved"),
    [(False, 1), (True, 0)],
    ids=["memory for its value comes with a descriptor", "memory of the first result comes with one"],
)
def test_a_rank_without_descriptors_for_one_call_shifts_no_sum(two_workers: Any, own: bool, starved: int) -> None:
    program = f"OWN, STARVED = {own}, {starved}\n{STEPS}"
    clients = [two_workers.client(rank, 3, f"starved {own}", program) for rank in range(3)]
    found = []
    for client in clients:
        out, err = client.communicate(timeout=60)
        assert client.returncode == 0, (out, err, two_workers.log)
        found.append(json.loads(out))
    for totals, _ in found:
        assert all(total in (6 * 10.0**step, -1) for step, total in enumerate(totals[:3])) and totals[3] == 3, found
    assert len({tuple(totals[2:]) for totals, _ in found}) == 1, "they go on alike"
    (_, told) = found[1]
    assert told and told[0] == ["ResourceExhaustedError", True], found


OTHERS = """
import os, resource, sys
import numpy as np
import collectived as cd

def starve(call):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        call()
        print("went well")
    except cd.errors.CollectiveError as error:
        print(type(error).__name__, "RLIMIT_NOFILE is 3" in str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

with cd.connect() as session:
    starve(cd.connect)
    starve(lambda: session.empty(1 << 22))
    print(session.empty(1 << 22).nbytes)
"""


def test_a_process_without_descriptors_is_told_so_when_it_connects_and_when_it_asks_for_memory(one_worker: Any) -> None:
    client = one_worker.client(0, 1, "none", OTHERS)
    out, err = client.communicate(timeout=60)
    assert client.returncode == 0, (out, err)
    assert out.splitlines() == ["ResourceExhaustedError True"] * 2 + [str(4 << 22)]
