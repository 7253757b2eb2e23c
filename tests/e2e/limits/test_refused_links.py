"""A worker that has no room for a link says so, and no rank is blamed for it."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import Daemon
from tests.e2e.limits.test_floods import LITTLE
from tests.waiting import settle

import collectived as cd
from collectived_proto.cause import Cause

pytestmark = pytest.mark.timeout(120)


def test_where_descriptors_run_out_a_link_is_refused_and_no_rank_is_called_lost() -> None:
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as name, contextlib.ExitStack() as stack:

        def start(*arguments: str, within: tuple[str, ...] = ()) -> dict[str, Any]:
            daemon = Daemon(*arguments, within=within)
            stack.callback(daemon.close)
            return daemon.wait_ready()

        start("coordinator", "--listen", f"unix:{name}/c.sock")
        place = ("--coordinator", f"unix:{name}/c.sock", "--folder", name)
        addresses = [
            str(start("worker", "--task", str(task), "--host-name", f"host{task}", *place, within=within)["address"])
            for task, within in enumerate([(), LITTLE])
        ]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        sessions = [stack.enter_context(cd.connect(address)) for address in addresses]

        def joined() -> list[cd.Group]:
            asked = [pool.submit(one.join, "pair", 2, rank=rank, timeout=20) for rank, one in enumerate(sessions)]
            return [one.result() for one in asked]

        def failed(group: cd.Group) -> cd.errors.CollectiveError:
            with pytest.raises(cd.errors.UnavailableError) as caught:
                group.barrier()  # which takes no memory of the worker
            return caught.value

        groups = joined()
        with contextlib.ExitStack() as held:
            for _ in range(200):  # which are shown out after 10 s; a link is dialled for 5
                silent = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                silent.connect(str(Path(name) / "door-1.sock"))
            errors = list(pool.map(failed, groups))
        for error in errors:
            assert error.verdict is not None and error.verdict.cause is Cause.LINK_REFUSED
            assert (error.missing, error.differing, error.verdict.origin, error.rejoin) == ((), (), None, True)
            text = "worker 0 (host host0) has no link to worker 1 (host host1): no handshake with 127.0.0.1:"
            assert text in str(error) and "it has hardly any file descriptors left" in str(error), str(error)

        def summed() -> bool:
            """Once the silent ones are gone."""
            try:
                return list(pool.map(lambda group: group.all_reduce("sum", 1), joined())) == [2, 2]
            except cd.errors.CollectiveError:
                return False

        settle(summed, 60)
