"""A sender that is stopped amid a large message, and the receive of it."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from tests.waiting import settle

import collectived as cd

SENDER = """
import sys, numpy as np, collectived as cd
with cd.connect() as session:
    group = session.join(timeout=20)
    value = np.ones(30_000_000)
    group.barrier()
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        group.send(value, 0)
        group.barrier(timeout=20)
    except cd.errors.CollectiveError as error:
        print([member.rank for member in error.missing], error, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("source", [1, None])
def test_a_receive_that_has_begun_to_take_a_message_cannot_be_cancelled_and_ends_the_group_at_its_deadline(
    one_worker: Any, source: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLECTIVED_DIRECT", "0")  # else the rest is read in the sender's process, which may be stopped
    name = f"half-sent-{source}"
    with (
        one_worker.client(1, 2, name, SENDER) as client,
        cd.connect(one_worker.addresses[0]) as session,
        session.join(name, 2, rank=0, timeout=20) as group,
    ):
        try:
            group.barrier()
            assert client.stdout.readline() == "ready\n"
            work = group.recv(source, async_op=True, timeout=2.0)
            client.stdin.write("\n")
            client.stdin.flush()
            call: Any = work._call
            settle(lambda: call.job is not None and call.job.source() == 1)  # matched: 240 MB are on their way
            client.send_signal(signal.SIGSTOP)
            assert not work.cancel()
            with pytest.raises(cd.errors.DeadlineExceededError, match="within 2.0 s") as caught:
                work.result()
            assert caught.value.rejoin and [member.rank for member in caught.value.missing] == [1]
            client.send_signal(signal.SIGCONT)
            assert client.stdout.readline() == f"[1] {caught.value}\n"
        finally:
            client.kill()
