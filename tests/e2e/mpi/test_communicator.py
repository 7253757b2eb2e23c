"""A program of mpi4py's does over a group what it does over a communicator."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from tests.e2e.conftest import Cluster

import collectived as cd
from collectived import mpi

RANKS = 3


def run(cluster: Cluster, body: Any, ranks: int = RANKS) -> list[Any]:
    options = cd.CommunicationOptions(timeout_seconds=20)
    return cluster.run_sessions(ranks, lambda session, group: body(mpi.Comm(group)), options=options)


def reduces(comm: mpi.Comm) -> list[Any]:
    mine, found = np.full(3, comm.rank + 1.0), np.zeros(3)
    comm.Allreduce(mine, found, op=mpi.MAX)
    root = np.zeros(3)
    comm.Reduce(mine, root, root=1)
    comm.Allreduce(mpi.IN_PLACE, mine)
    block = np.zeros(1)
    comm.Reduce_scatter_block(mine, block)
    part = np.zeros(comm.rank + 1, int)
    comm.Reduce_scatter(np.arange(6), part)
    return [found.tolist(), root.tolist(), mine.tolist(), block.tolist(), part.tolist()]


def test_reductions(two_workers: Cluster) -> None:
    parts = [[0], [3, 6], [9, 12, 15]]
    roots = [[0.0] * 3, [6.0] * 3, [0.0] * 3]
    assert run(two_workers, reduces) == [
        [[3.0] * 3, roots[rank], [6.0] * 3, [18.0], parts[rank]] for rank in range(RANKS)
    ]


def moves(comm: mpi.Comm) -> list[Any]:
    taken = np.full(2, comm.rank)
    comm.Bcast(taken, root=2)
    rows = np.arange(6) if comm.rank == 0 else None
    piece = np.zeros(2, int)
    comm.Scatter(rows, piece)
    spread = np.zeros(6, int) if comm.rank == 1 else None
    comm.Gatherv(piece[: 1 + (comm.rank == 1)], [spread, ([1, 2, 1], [0, 2, 5])], root=1)
    all_of_it = np.zeros((RANKS, 2), int)
    comm.Allgather(piece, all_of_it)
    turned = np.zeros(RANKS, int)
    comm.Alltoall(np.arange(RANKS) + 10 * comm.rank, turned)
    lengths = [comm.rank + 1] * RANKS
    longer = np.zeros(6, int)
    comm.Alltoallv([np.full(sum(lengths), comm.rank), lengths], [longer, [1, 2, 3]])
    return [x if x is None else x.tolist() for x in (taken, piece, spread, all_of_it, turned, longer)]


def test_movements(two_workers: Cluster) -> None:
    whole = [[0, 1], [2, 3], [4, 5]]
    assert run(two_workers, moves) == [
        [
            [2, 2],
            whole[rank],
            [0, 0, 2, 3, 0, 4] if rank == 1 else None,
            whole,
            [rank, 10 + rank, 20 + rank],
            [0, 1, 1, 2, 2, 2],
        ]
        for rank in range(RANKS)
    ]


def talks(comm: mpi.Comm) -> list[Any]:
    right, left = (comm.rank + 1) % RANKS, (comm.rank - 1) % RANKS
    ring = np.full(2, comm.rank)
    comm.Sendrecv_replace(ring, right, 1, left, 1)
    near, far = np.zeros(1), np.zeros(4)
    status = mpi.Status()
    sent = comm.Isend(np.full(2, float(comm.rank)), right, tag=3)
    comm.Recv(far, mpi.ANY_SOURCE, 3, status)
    requests = [comm.Irecv(near, left), comm.Isend(np.full(1, 7.0), right), comm.Iallreduce(mpi.IN_PLACE, ring), sent]
    filled: list[mpi.Status] = []
    mpi.Request.Waitall(requests, filled)
    comm.Sendrecv(None, mpi.PROC_NULL, recvbuf=None, source=mpi.PROC_NULL)
    return [
        ring.tolist(),
        [status.Get_source(), status.Get_tag(), status.Get_count(mpi.DOUBLE), status.Get_count(np.dtype("c16"))],
        far.tolist(),
        near.tolist(),
        [filled[0].source, filled[0].tag, any(requests)],
    ]


def test_messages_and_requests(two_workers: Cluster) -> None:
    for rank, found in enumerate(run(two_workers, talks)):
        left = (rank - 1) % RANKS
        assert found == [[3, 3], [left, 3, 2, 1], [left, left, 0, 0], [7.0], [left, 0, False]]


def test_waitany_takes_what_has_ended(one_worker: Cluster) -> None:
    def body(comm: mpi.Comm) -> Any:
        if comm.rank == 1:
            comm.Send(np.full(1, 5), 0, tag=2)
            comm.Barrier()
            return None
        first, second = np.zeros(1, int), np.zeros(1, int)
        requests = [comm.Irecv(first, 1, 1), comm.Irecv(second, 1, 2)]
        index = mpi.Request.Waitany(requests)
        assert not requests[0].Test()
        requests[0].Cancel()
        status = mpi.Status()
        requests[0].Wait(status)
        comm.Barrier()
        return index, second.tolist(), status.Is_cancelled(), mpi.Request.Waitany(requests)

    assert run(one_worker, body, 2)[0] == (1, [5], True, mpi.UNDEFINED)


def test_communicators_are_split_and_freed(two_workers: Cluster) -> None:
    def body(comm: mpi.Comm) -> Any:
        part = comm.Split(mpi.UNDEFINED if comm.rank == 2 else 0, -comm.rank)
        here = comm.Split_type(mpi.COMM_TYPE_SHARED)
        twin = comm.Dup()
        sizes = [twin.Get_size(), here.size]
        twin.Free()
        return part.rank if part is not mpi.COMM_NULL else None, sizes, bool(twin), bool(part)

    assert run(two_workers, body) == [(1, [3, 2], False, True), (0, [3, 2], False, True), (None, [3, 1], False, False)]


def test_a_message_that_does_not_fit_is_an_error_of_the_receiver_alone(one_worker: Cluster) -> None:
    def body(comm: mpi.Comm) -> list[str]:
        said = []
        for sent, taken in ((np.zeros(3), np.zeros(2)), (np.zeros(1, np.int32), np.zeros(1))):
            if comm.rank == 0:
                comm.Send(sent, 1)
            else:
                with pytest.raises(ValueError) as caught:
                    comm.Recv(taken, 0)
                said.append(str(caught.value))
            comm.Barrier()
        return said

    long, other = run(one_worker, body, 2)[1]
    assert long == "the message has 3 elements, recvbuf only 2; the message is lost"
    assert other.startswith("the message is int32[1], recvbuf takes float64")


def test_what_is_not_offered_says_what_is(one_worker: Cluster) -> None:
    def body(comm: Any) -> None:
        with pytest.raises(AttributeError, match=r"allreduce takes any object, .* use comm\.group\.all_reduce"):
            comm.allreduce(1)
        with pytest.raises(AttributeError, match="Comm has no Scan"):
            comm.Scan(None, None)
        with pytest.raises(ValueError, match="ANY_TAG is not offered"):
            comm.Recv(bytearray(1), tag=mpi.ANY_TAG)
        with pytest.raises(ValueError, match="split_type must be COMM_TYPE_SHARED"):
            comm.Split_type(7)
        with pytest.raises(ValueError, match="this is COMM_NULL"):
            mpi.COMM_NULL.Barrier()

    run(one_worker, body, 1)


PROGRAM = """
import numpy as np
from collectived import mpi as MPI

comm = MPI.COMM_WORLD
total = np.zeros(1)
comm.Allreduce(np.full(1, comm.rank + 1.0), total)
print(comm.Get_rank(), comm.Get_size(), total[0], MPI.COMM_SELF.size, MPI.COMM_WORLD.name, flush=True)
if comm.rank == 1:
    comm.Abort(3)
try:
    comm.Barrier()
except MPI.Exception as error:
    print(type(error).__name__, "MPI_Abort(3)" in str(error))
"""


def test_every_process_has_a_world(two_workers: Cluster) -> None:
    clients = [two_workers.client(rank, 2, "mpi", PROGRAM) for rank in range(2)]
    said = [client.communicate(timeout=60) for client in clients]
    assert [client.returncode for client in clients] == [0, 3], said
    assert said[0][0].splitlines() == ["0 2 3.0 1 mpi", "AbortedError True"]
    assert said[1][0].splitlines() == ["1 2 3.0 1 mpi"]


def test_it_is_not_imported_unless_somebody_asks() -> None:
    asked = "import sys, collectived as cd; print('collectived.mpi' in sys.modules, cd.mpi.SUM is cd.ReduceOp.SUM)"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout == "False True\n"


def test_a_failed_call_ends_in_the_error_of_the_group(one_worker: Cluster) -> None:
    def body(comm: mpi.Comm) -> None:
        with pytest.raises(cd.errors.InvalidArgumentError, match="rank 1 differs"):
            comm.Bcast(np.zeros(1 + comm.rank))

    run(one_worker, body, 2)


def test_a_request_amid_whose_wait_a_signals_handler_raises_is_not_taken_for_received(one_worker: Cluster) -> None:
    class Woken(Exception):
        pass

    def wake(number: int, frame: object) -> None:
        raise Woken

    before = signal.signal(signal.SIGALRM, wake)
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        sessions = [stack.enter_context(cd.connect(one_worker.addresses[0])) for _ in range(2)]
        joining = pool.submit(sessions[1].join, "woken", 2, rank=1, timeout=20)
        here = mpi.Comm(sessions[0].join("woken", 2, rank=0, timeout=20))
        there = mpi.Comm(joining.result(20))
        taken = np.full(3, -1)
        request = here.Irecv(taken, source=1)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Woken):
                request.Wait()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert request  # it is still to be waited for
        with pytest.raises(cd.errors.AbortedError, match="rank 0"):
            request.Wait()
        with pytest.raises(cd.errors.AbortedError):
            there.Send(np.arange(3), dest=0)
        assert not request
        assert taken.tolist() == [-1] * 3
