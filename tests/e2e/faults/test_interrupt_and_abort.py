"""Ctrl-C and aborts: whoever it is, all ranks hear of it, and at once."""

from __future__ import annotations

import itertools
import signal
import time
from typing import Any

import pytest

import collectived as cd

WAITS = """
import os, sys, threading, time, collectived as cd

WAITS = {
    "barrier": lambda group: group.barrier(),
    "result": lambda group: group.barrier(async_op=True).result(),
    "deadline": lambda group: group.barrier(cd.CommunicationOptions(timeout_seconds=30)),
    "recv": lambda group: group.recv(0),
    "recv from any": lambda group: group.recv(),
}

def say_when_it_waits():
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name not in ("_read_until", "wait_as_follower", "submit", "_wait"):
        os.sched_yield()
    print("waiting", flush=True)

with cd.connect() as session:
    group = session.join(timeout=20)
    use = WAITS[sys.stdin.readline().strip()]
    threading.Thread(target=say_when_it_waits).start()
    try:
        use(group)
    except KeyboardInterrupt:
        print(time.monotonic(), flush=True)
    try:
        group.barrier()
    except cd.errors.AbortedError as error:
        sys.stdin.readline()
        print(error, flush=True)
"""


@pytest.mark.parametrize("use", ["barrier", "result", "deadline", "recv", "recv from any"])
def test_ctrl_c_in_a_wait_is_raised_within_a_tenth_of_a_second_and_aborts_the_group(
    one_worker: Any, use: str, delays: Any
) -> None:
    names = (f"{use}-{number}" for number in itertools.count())

    def interrupt() -> None:
        assert interrupted(one_worker, next(names), use) < 0.1 + delays.room

    delays.hold(interrupt)


def interrupted(cluster: Any, name: str, use: str) -> float:
    """Seconds from the signal until KeyboardInterrupt is caught; the other rank has heard why the group is over."""
    with (
        cluster.client(1, 2, name, WAITS) as client,
        cd.connect(cluster.addresses[0]) as session,
        session.join(name, 2, rank=0, timeout=20) as group,
    ):
        try:
            client.stdin.write(f"{use}\n")
            client.stdin.flush()
            assert client.stdout.readline() == "waiting\n"
            pressed = time.monotonic()
            client.send_signal(signal.SIGINT)
            raised = client.stdout.readline()
            with pytest.raises(cd.errors.AbortedError, match="interrupted on rank 1") as caught:
                group.barrier()
            assert [member.rank for member in caught.value.missing] == [1]
            out, err = client.communicate(timeout=20)
        finally:
            client.kill()
    assert client.returncode == 0, err
    assert "interrupted on rank 1" in out
    return float(raised) - pressed


@pytest.mark.parametrize("culprit", range(4))
def test_an_abort_from_any_rank_ends_the_group_on_all_with_its_words(two_workers: Any, culprit: int) -> None:
    def body(group: cd.Group) -> Any:
        group.barrier()
        work = group.barrier(async_op=True) if group.rank != culprit else None
        if work is None:
            group.abort(f"rank {culprit} has seen enough")
        with pytest.raises(cd.errors.AbortedError, match=f"rank {culprit} has seen enough") as caught:
            work.result() if work else group.barrier()
        with pytest.raises(cd.errors.AbortedError):
            group.barrier()
        group.rejoin(timeout=20)
        assert [member.last_instance for member in group.members] == [0] * 4
        assert group.all_reduce("sum", 1.0) == 4.0
        return caught.value.rejoin, [member.rank for member in caught.value.missing if group.rank != culprit]

    found = two_workers.run(4, body)
    for rank, (rejoin, missing) in enumerate(found):
        assert rejoin and missing == ([] if rank == culprit else [culprit])
