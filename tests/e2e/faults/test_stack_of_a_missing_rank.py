"""A rank that does not come: the error of the others, and the status, say what it does instead."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from tests.waiting import settle

from collectived_proto.v1 import status_pb2 as pb

LATE = 2  # of three ranks
PROGRAM = """
import ctypes, json, sys, threading, time
import collectived as cd

def load_batch():
    time.sleep(3600)

def take_lock():
    lock = threading.Lock()
    with lock:
        lock.acquire(timeout=3600)

def hold_gil():
    ctypes.PyDLL(None).sleep(3600)

def loop():
    while True:
        pass

def read():
    sys.stdin.readline()

with cd.connect() as session, session.join(timeout=60) as group:
    group.barrier()
    print("ready", flush=True)
    what = sys.stdin.readline().strip()
    if what != "come":
        globals()[what]()
    try:
        group.all_reduce("sum", 1.0, timeout=TIMEOUT)
    except cd.errors.DeadlineExceededError as error:
        stacks = [[member.rank, member.stack] for member in error.missing]
        print(json.dumps([str(error), stacks, [member.stack for member in error.members]]), flush=True)
"""


@contextlib.contextmanager
def ranks(cluster: Any, group: str, timeout: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Three of them, which wait to be told what to do; below the program of the last one lies nothing on its stack."""
    start = {LATE: cluster.fresh_client}
    clients = [
        start.get(rank, cluster.client)(rank, 3, group, PROGRAM.replace("TIMEOUT", str(timeout))) for rank in range(3)
    ]
    try:
        for client in clients:
            assert client.stdout.readline() == "ready\n", client.communicate()
        yield clients
    finally:
        for client in clients:
            client.kill()
            client.communicate()


def tell(client: subprocess.Popen[str], what: str) -> None:
    assert client.stdin is not None
    client.stdin.write(f"{what}\n")
    client.stdin.flush()


def hear(client: subprocess.Popen[str]) -> Any:
    assert client.stdout is not None
    return json.loads(client.stdout.readline())


@pytest.fixture(params=[1, 3], ids=["one worker", "three workers"])
def workers(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue({1: "one_worker", 3: "three_workers"}[request.param])


MAIN = r" <- <string>:\d+ in <module>"
DOINGS = [
    ("load_batch", rf"<string>:\d+ in load_batch{MAIN}"),
    ("take_lock", rf"<string>:\d+ in take_lock{MAIN}"),
    ("read", rf"<string>:\d+ in read{MAIN}"),
    ("loop", rf"<string>:\d+ in loop{MAIN}"),
    ("hold_gil", r"no answer: it sleeps, perhaps in C code that holds the GIL"),
]


@pytest.mark.parametrize(("what", "expected"), DOINGS, ids=[what for what, _ in DOINGS])
def test_the_error_says_what_the_missing_rank_does(workers: Any, what: str, expected: str) -> None:
    with ranks(workers, what, 3.0) as clients:
        tell(clients[LATE], what)
        for client in clients[:LATE]:
            tell(client, "come")
        told = [hear(client) for client in clients[:LATE]]
    assert told[0] == told[1]
    text, missing, members = told[0]
    assert re.search(
        rf"rank {LATE} \(.*\) has not come; it last did barrier\(\) #0 at <string>:\d+; now: {expected};", text
    )
    [(rank, stack)] = missing
    assert rank == LATE and re.fullmatch(expected, stack.partition("\n")[0])
    assert members == ["", "", ""]


def test_of_a_rank_that_is_stopped_the_error_says_so(workers: Any) -> None:
    with ranks(workers, "stopped", 3.0) as clients:
        clients[LATE].send_signal(signal.SIGSTOP)
        for client in clients[:LATE]:
            tell(client, "come")
        told = [hear(client) for client in clients[:LATE]]
    assert told[0] == told[1] and told[0][1] == [[LATE, "no answer: its process is stopped"]]


def test_a_rank_over_grpc_alone_is_asked_too(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVED_TRANSPORT", "grpc")
    with ranks(workers, "grpc", 3.0) as clients:
        tell(clients[LATE], "load_batch")
        for client in clients[:LATE]:
            tell(client, "come")
        told = [hear(client) for client in clients[:LATE]]
    assert told[0] == told[1]
    assert re.search(rf"; now: <string>:\d+ in load_batch{MAIN}; ranks 0, 1 are waiting", told[0][0])
    assert re.match(rf"<string>:\d+ in load_batch{MAIN}", told[0][1][0][1])


def test_status_says_what_a_rank_does_for_which_others_wait(workers: Any) -> None:
    def stacks() -> dict[int, str]:
        reply: pb.StatusReply = workers.status()
        [group] = [one for one in reply.groups if one.name.endswith("/status") and one.state == "ready"]
        return {member.rank: member.stack for member in group.members if member.stack}

    with ranks(workers, "status", 60.0) as clients:
        assert stacks() == {}
        tell(clients[LATE], "load_batch")
        tell(clients[0], "come")
        settle(lambda: re.match(rf"<string>:\d+ in load_batch{MAIN}", stacks().get(LATE, "")))
        settle(lambda: re.match(r"<string>:\d+ in <module>", stacks().get(1, "")))
        tell(clients[1], "come")
        settle(lambda: list(stacks()) == [LATE])


def test_a_lost_coordinator_does_not_take_that_away(make_cluster: Any, delays: Any) -> None:
    cluster, names = make_cluster(1), (f"alone-{number}" for number in itertools.count())

    def story() -> None:  # ranks that hear nothing in time decide for themselves
        with ranks(cluster, next(names), 3.0) as clients:
            cluster.coordinator.process.send_signal(signal.SIGSTOP)
            try:
                tell(clients[LATE], "load_batch")
                for client in clients[:LATE]:
                    tell(client, "come")
                told = [hear(client) for client in clients[:LATE]]
            finally:
                cluster.coordinator.process.send_signal(signal.SIGCONT)
        assert told[0] == told[1] and "; now: <string>:" in told[0][0] and "decided by" in told[0][0]

    delays.hold(story)
