"""A worker that has no thread for one more group refuses that one at once, and goes on serving all others."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.e2e.conftest import Cluster, Daemon

import collectived as cd

FULL = """
import sys
import threading
from collectived_runtime.__main__ import main

start = threading.Thread.start

def begin(thread):
    if thread.name == "group loop unlucky" and "host1" in sys.argv:
        raise RuntimeError("can't start new thread")
    start(thread)

threading.Thread.start = begin
main()
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Of two workers, the second of which is let start no thread for one of the groups."""
    monkeypatch.setattr(Daemon, "COMMAND", (sys.executable, "-P", "-c", FULL))
    made = Cluster(2)
    yield made
    made.close()


def failed(what: Callable[[], Any]) -> cd.errors.CollectiveError:
    """How it failed, which it did at once: not when somebody's patience was over."""
    begun = time.monotonic()
    with pytest.raises(cd.errors.CollectiveError) as caught:
        what()
    assert time.monotonic() - begun < 10.0
    return caught.value


def test_no_room_for_a_group_loop_ends_that_group_at_once_and_no_other(cluster: Cluster) -> None:
    with cd.connect(cluster.addresses[0]) as first, cd.connect(cluster.addresses[1]) as second:
        with second.join("lucky", 1, timeout=20) as lucky, ThreadPoolExecutor(1) as pool:
            refused = pool.submit(failed, lambda: second.join("unlucky", 2, rank=1, timeout=30))
            group = first.join("unlucky", 2, rank=0, timeout=30)
            error = refused.result()
            assert isinstance(error, cd.errors.ResourceExhaustedError)
            assert "rank 1 of group 'unlucky' is refused: " in str(error) and "can't start new thread" in str(error)
            lost = failed(lambda: group.all_reduce("sum", 1.0))
            assert isinstance(lost, cd.errors.UnavailableError) and [member.rank for member in lost.missing] == [1]
            assert "its worker has no room for it: can't start new thread" in str(lost)
            assert lucky.all_reduce("sum", 2.0) == 2.0
        assert cluster.run(2, lambda group: group.all_reduce("sum", 1.0)) == [2.0, 2.0]
