"""Ranks that are killed while others receive from any of them, cancel receives and let them time out: a drill.

Every survivor hears of it by one verdict that names the dead rank, no receive hangs, and what had come from each sender
until then was each of its messages, once and in order.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import pytest
from tests.conftest import Delays

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.parametrize("transport", ["shared memory", "grpc"], indirect=True),
    pytest.mark.parametrize("workers", [1, 3]),
]
ROUNDS = 3
SIZES = (1, 100, 40_000, 300_000)

BEGIN = (
    f"SIZES = {SIZES!r}"
    + """
import itertools, json, random, sys, time
import numpy as np
import collectived as cd

def check(value, sender, number):
    assert len(value) == SIZES[number % len(SIZES)] + 2, (len(value), sender, number)
    assert (value[:2] == (sender, number)).all() and (value[2:] == number).all(), (value[:4], sender, number)

session = cd.connect()
group = session.join(timeout=40)
chance = random.Random(group.rank)
heard = [0, 0, 0]
error = None
group.barrier()
print("ready", flush=True)
"""
)
END = """
print(json.dumps({"missing": [member.rank for member in error.missing], "code": int(error.code),
                  "heard": heard, "wrong": wrong, "said": str(error), "by": error.decided_by}), flush=True)
sys.stdin.readline()  # the others hear of the kill first
session.close()
"""
SENDER = (
    BEGIN
    + """
wrong = ""
try:
    for number in itertools.count():
        value = np.full(SIZES[number % len(SIZES)] + 2, number, np.float64)
        value[:2] = group.rank, number
        group.send(value, 0)
        if number % 20 == 19:  # it is not too far ahead
            group.recv(0, tag=1, timeout=30)
except cd.errors.CollectiveError as failed:
    error = failed
"""
    + END
)
RECEIVER = (
    BEGIN
    + """
wrong = ""
try:
    while True:
        way = chance.randrange(4)
        try:
            if way == 0:
                work = group.recv(async_op=True, timeout=chance.choice((0.0005, 0.01, 30)))
            elif way == 1:
                work = group.recv(chance.choice((1, 2)), async_op=True, timeout=30)
            else:
                work = group.recv(async_op=True)
                if way == 2 and work.cancel():
                    continue
            value = work.result()
        except cd.errors.DeadlineExceededError as late:
            if late.rejoin:
                raise
            continue
        check(value, work.source, heard[work.source])
        heard[work.source] += 1
        if heard[work.source] % 20 == 0:
            group.send(0.0, work.source, tag=1)
except cd.errors.CollectiveError as failed:
    error = failed
except AssertionError as failed:
    wrong = repr(failed)
    group.abort(wrong)
    error = cd.errors.AbortedError()
"""
    + END
)


@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_of_a_kill_amid_receives_from_any_rank_agree_and_have_lost_nothing(
    request: pytest.FixtureRequest, delays: Delays, workers: int, transport: str, victim: int
) -> None:
    cluster: Any = request.getfixturevalue("one_worker" if workers == 1 else "three_workers")
    chance = random.Random(f"{workers}{transport}{victim}")
    numbers = itertools.count()

    def play() -> None:
        name = f"kills-{workers}-{transport[:4]}-{victim}-{next(numbers)}"
        ranks = [cluster.client(rank, 3, name, SENDER if rank else RECEIVER) for rank in range(3)]
        try:
            assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * 3
            time.sleep(chance.random() * 0.4)
            ranks[victim].kill()
            survivors = [rank for rank in range(3) if rank != victim]
            told = [ranks[rank].stdout.readline() for rank in survivors]
            found = [
                json.loads(line) if line else ranks[rank].stderr.read()
                for rank, line in zip(survivors, told, strict=True)
            ]
            assert [one["missing"] for one in found] == [[victim]] * 2, found
            assert {one["code"] for one in found} == {14} and not any(one["wrong"] for one in found), found
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()

    for _ in range(ROUNDS):
        delays.hold(play)  # where a worker cannot answer in time, a receive with a short one ends the group
