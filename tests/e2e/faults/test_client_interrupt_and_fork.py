"""Client processes and their memory beside real workers: Ctrl-C, abort, fork."""

from __future__ import annotations

import contextlib
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.forked_process import ForkedProcess

import collectived as cd
from collectived.shared.doorbell import Doorbell

ROUNDS = 25
INTERRUPTED = f"""
import json, os, random, signal, threading, collectived as cd, numpy as np
session = cd.connect()
chance, seen = random.Random(5), {{"interrupted": 0, "aborted": 0, "wrong": 0, "ended": 0}}
for number in range({ROUNDS}):
    group = session.join(timeout=20)
    value = np.full(1000, 1 + number)  # its copy goes where another lay before
    try:
        group.barrier()
        pressing = threading.Timer(chance.random() * 0.02, os.kill, (os.getpid(), signal.SIGINT))
        pressing.start()
        while True:
            result = group.all_reduce("sum", value)
            seen["ended"] += 1
            seen["wrong"] += not (result == value * group.size).all()
    except KeyboardInterrupt:
        seen["interrupted"] += 1
        pressing.join()
    except cd.errors.AbortedError:
        seen["aborted"] += 1
    try:
        group.leave()
    except cd.errors.CollectiveError:
        pass
print(json.dumps(seen))
"""


def outcome(process: ForkedProcess) -> dict[str, int]:
    out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    found: dict[str, int] = json.loads(out)
    return found


def test_a_rank_that_is_interrupted_again_and_again_joins_again_and_spoils_nothing(any_workers: Any) -> None:
    """The one that is interrupted is a process; the others are threads, which nobody interrupts."""
    size = 2 * len(any_workers.addresses)
    with any_workers.client(0, size, "interrupted", INTERRUPTED) as client, ThreadPoolExecutor(size) as pool:
        others = [pool.submit(aborted, any_workers.address_of(rank, size), rank, size) for rank in range(1, size)]
        try:
            first = outcome(client)
        finally:
            client.kill()
        assert first["interrupted"] == ROUNDS and first["aborted"] == 0 and first["wrong"] == 0
        assert [one.result(20) for one in others] == [0] * (size - 1)


def aborted(address: str, rank: int, size: int) -> int:
    """Sums beside one that is interrupted, and hears of it every time; how many sums were wrong."""
    wrong = 0
    with cd.connect(address) as session:
        for number in range(ROUNDS):
            group = session.join("interrupted", size, rank=rank, timeout=20)
            value = np.full(1000, 1 + number)
            with pytest.raises(cd.errors.AbortedError):
                group.barrier()
                while True:
                    wrong += not (group.all_reduce("sum", value) == value * size).all()
            with contextlib.suppress(cd.errors.CollectiveError):
                group.leave()
    return wrong


def test_memory_that_is_reused_after_an_abort_reaches_nobody(two_workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Doorbell, "_abort_ack_timeout", 20.0)  # however busy this machine is

    def one(session: cd.Session, group: cd.Group) -> bool:
        value = session.empty(1 << 20, np.float32)
        value[:] = 1
        group.barrier()
        if group.rank:
            try:
                return bool((group.all_reduce("sum", value) == group.size).all())
            except cd.errors.AbortedError:
                return True
        work = group.all_reduce("sum", value, async_op=True)
        group.abort("changed my mind")
        value[:] = 1e6
        assert isinstance(work.exception(), cd.errors.AbortedError | None)
        return True

    for _ in range(10):
        assert all(two_workers.run_sessions(2, lambda session, group: tolerant(one, session, group)))


def tolerant(body: Any, session: cd.Session, group: cd.Group) -> bool:
    """The result of `body`; the abort that `leave` tells of is expected."""
    found = bool(body(session, group))
    with contextlib.suppress(cd.errors.AbortedError):
        group.leave()
    return found


FORKING = """
import os, time, collectived as cd, numpy as np
session = cd.connect()
group = session.join()
value, slowest, codes = session.empty(8), 0.0, []
value[:] = 1
for number in range(1, 5):
    group.all_reduce("sum", np.ones(number))  # described anew
    began = time.monotonic()
    child = os.fork()
    if not child:
        links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if int(name) > 2
                 and os.path.lexists(f"/proc/self/fd/{name}")]
        held = [link for link in links if link.startswith("socket:")]
        with cd.connect() as own, own.join(f"/child-{os.getpid()}", 1, rank=0) as alone:
            right = alone.all_reduce("sum", number) == number
        os._exit(1 if held else 0 if right else 2)
    slowest = max(slowest, time.monotonic() - began)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    group.all_reduce("sum", value)
print(slowest, codes)
"""


SPINNING = """
import os, threading, collectived as cd
session = cd.connect()
group = session.join()
ended, codes = threading.Event(), []

def spin():  # of one size after the other, so that forks meet collectives that are being described
    length = 0
    while not ended.is_set():
        length += 1
        group.all_reduce("sum", [0.0] * length)
        session.empty(100)

spinning = threading.Thread(target=spin)
spinning.start()
for _ in range(40):
    child = os.fork()
    if not child:
        try:
            session.empty(3)
        except cd.errors.FailedPreconditionError:
            os._exit(0)
        os._exit(1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
ended.set()
spinning.join()
print(set(codes))
"""


def test_forks_beside_a_thread_that_describes_collectives_give_children_that_live(one_worker: Any) -> None:
    client = one_worker.client(0, 1, "spinning", SPINNING)
    out, err = client.communicate(timeout=50)
    assert (client.returncode, out) == (0, "{0}\n"), (out, err)


def test_forks_are_quick_and_children_connect_for_themselves(one_worker: Any, delays: Any) -> None:
    names = (f"forking-{number}" for number in itertools.count())

    def fork() -> None:
        name = next(names)
        for client in [one_worker.client(rank, 2, name, FORKING) for rank in range(2)]:
            out, err = client.communicate(timeout=50)
            slowest, _, codes = out.partition(" ")
            assert (client.returncode, codes) == (0, f"{[0] * 4}\n"), (out, err)
            assert float(slowest) < 0.5 + delays.room

    delays.hold(fork)
