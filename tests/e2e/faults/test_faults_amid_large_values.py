"""What goes wrong while ranks of one worker read large values in each other's processes: one verdict, in time."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from tests.forked_process import ForkedProcess

pytestmark = pytest.mark.timeout(150)
RANKS, ROUNDS = 3, 4

PROGRAM = """
import json, sys
import numpy as np
import collectived as cd

LARGE = 5 << 20  # bytes from one rank for another
session = cd.connect()
group = session.join(timeout=40)
row = np.empty(LARGE, np.uint8)
rows = np.empty(group.size * LARGE, np.uint8)
out, taken = np.empty_like(rows), np.empty_like(row)
before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size

def step(number):
    row[:], rows[:] = number % 251, number % 251
    got = [group.all_to_all(rows, out=out), group.broadcast(row, root=number % group.size, out=taken)]
    got.append(group.all_gather(row, out=out))
    receiving = group.recv(before, async_op=True)
    group.send(row, after)
    row[:] = 255  # it is the caller's again
    return [*got, receiving.result()]

print("ready", flush=True)
number = 0
try:
    while True:
        for value in step(number):
            assert value.min() == value.max() == number % 251, (number, value.min(), value.max())
        number += 1
        if number == 2:
            print("going", flush=True)
except cd.errors.CollectiveError as error:
    told = str(error).partition(" (decided by")[0]
    print(json.dumps([error.code, [member.rank for member in error.missing], number]), flush=True)
    sys.stdin.readline()
session.close()
"""


def read_line(process: ForkedProcess) -> str:
    assert process.stdout is not None
    return process.stdout.readline() or process.communicate()[1]


def test_a_rank_that_is_killed_while_others_read_its_value_is_named_by_all(make_cluster: Any) -> None:
    cluster, chance = make_cluster(1), random.Random(1)
    for number in range(ROUNDS):
        processes = [cluster.client(rank, RANKS, f"large {number}", PROGRAM) for rank in range(RANKS)]
        for line in ("ready\n", "going\n"):
            assert [read_line(process) for process in processes] == [line] * RANKS
        victim = chance.randrange(RANKS)
        time.sleep(chance.random() * 0.05)  # the moment is drawn
        processes[victim].kill()
        found = [json.loads(read_line(processes[rank])) for rank in range(RANKS) if rank != victim]
        assert [missing for _, missing, _ in found] == [[victim]] * (RANKS - 1), found
        assert len({code for code, _, _ in found}) == 1
        for process in processes:
            process.communicate()
