"""What a binding must do over the real libnccl on a real GPU, each fact a function; see test_binding_on_device.py.

Two ranks, each a process of its own, share one GPU, which NCCL takes for those of two hosts. Each plays its part of a
fact; they tell each other how far they are.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.e2e.gpu.gates import Gates
from tests.fakes.cuda import view_host_memory

from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import DType
from collectived_runtime.device.cuda.driver import Cuda
from collectived_runtime.device.nccl.communicators import (
    Communicator,
    Communicators,
    DeviceRank,
    PendingCommunicators,
)
from collectived_runtime.device.nccl.interface import (
    Nccl,
    NcclBlock,
    NcclBuffers,
    NcclDataType,
    NcclError,
    NcclOperation,
    NcclUsageError,
)

ABORT_SECONDS = 5.0  # that an abort or an init may take when nobody wants it any more, as in a worker
PATIENCE = 20.0  # seconds in which whatever does not hang is over
ROOM = 32 << 20  # bytes of a buffer
OLDEST = 22809  # the version of NCCL with which the adapters were tried first
KEY: Hashable = "group"


class Rank:
    """One of two ranks on GPU 0.

    Attributes:
        died: why a worker would have ended itself.
        notes: what came of it where both are right, for people.
    """

    def __init__(self, cuda: Cuda, nccl: Nccl, rank: int, peer: socket.socket) -> None:
        self.cuda, self.nccl, self.rank = cuda, nccl, rank
        self._peer, self._words = peer, peer.makefile("r")
        self.died: list[str] = []
        self.notes: list[str] = []
        cuda.set_device(0)
        self.stream, self.event = cuda.create_stream(0), cuda.create_event(0)
        self.send, _ = cuda.allocate(0, ROOM)
        self.receive, _ = cuda.allocate(0, ROOM)
        self.pinned = cuda.pin(ROOM)
        self.communicators = Communicators(nccl, cuda.set_device, self.died.append, ABORT_SECONDS)

    def tell(self, word: str) -> None:
        self._peer.sendall(f"{word}\n".encode())

    def hear(self) -> str:
        found = self._words.readline()
        if not found:
            raise EOFError("the other rank has ended")
        return found.strip()

    def meet(self) -> None:
        """Returns when the other rank has come here too."""
        self.tell("here")
        assert self.hear() == "here"

    def begin(self, size: int = 2, unique_id: bytes | None = None) -> PendingCommunicators:
        """Begins to make this rank's end of a communicator, with the id of rank 0."""
        if unique_id is None:
            unique_id = self.nccl.create_unique_id()
        return self.communicators.create(size, unique_id, [DeviceRank(0, self.rank if size > 1 else 0)], lambda: None)

    def share_id(self) -> bytes:
        if self.rank:
            return bytes.fromhex(self.hear())
        minted = self.nccl.create_unique_id()
        self.tell(minted.hex())
        return minted

    def make(self) -> Communicator:
        """This rank's end of a communicator of both, kept under `KEY`."""
        making = self.begin(2, self.share_id())
        until(lambda: making.done)
        (made,) = making.result()
        self.communicators.store(KEY, (made,))
        return made

    def put(self, value: NDArray[Any], address: int) -> None:
        self._host(value.nbytes)[:] = value.reshape(-1).view(np.uint8)
        self.cuda.copy(address, self.pinned, value.nbytes, self.stream)
        self.wait()

    def get(self, address: int, like: NDArray[Any]) -> NDArray[Any]:
        self.cuda.copy(self.pinned, address, like.nbytes, self.stream)
        self.wait()
        return self._host(like.nbytes).copy().view(like.dtype).reshape(like.shape)

    def _host(self, nbytes: int) -> NDArray[np.uint8]:
        return view_host_memory(self.pinned, nbytes)

    def wait(self) -> None:
        """Returns when all that is on the stream is done."""
        self.cuda.record(self.event, self.stream)
        until(lambda: self.cuda.is_event_done(self.event))

    def all_reduce(self, made: Communicator, value: NDArray[Any], op: NcclOperation, dtype: NcclDataType) -> Any:
        self.put(value, self.send)
        self.put(np.zeros_like(value), self.receive)
        buffers = NcclBuffers(self.send, self.receive, value.size, dtype)
        made.issue(lambda handle: self.nccl.all_reduce(buffers, op, handle, self.stream))
        return self.get(self.receive, value)

    def check_usable(self, made: Communicator) -> None:
        """The two ranks sum over it."""
        value = np.full(1000, self.rank + 1.0, np.float32)
        assert (self.all_reduce(made, value, NcclOperation.SUM, NcclDataType.FLOAT32) == 3).all()

    def launch(self, made: Communicator) -> None:
        """A collective that the other rank does not join."""
        buffers = NcclBuffers(self.send, self.receive, 1000, NcclDataType.FLOAT32)
        made.issue(lambda handle: self.nccl.all_reduce(buffers, NcclOperation.SUM, handle, self.stream))

    def abort(self) -> float:
        """Has the communicator aborted as a verdict does; the seconds that it took."""
        began = time.monotonic()
        (call,) = self.communicators.tear_down(KEY, orderly=False)
        assert call.wait(ABORT_SECONDS), f"the abort has not returned within {ABORT_SECONDS:g} s"
        if call.error is not None:
            assert isinstance(call.error, NcclError), call.error
            self.notes.append(f"the abort says: {call.error}")
        return time.monotonic() - began

    def end(self) -> None:
        """Both ranks end their communicator in order."""
        self.meet()
        (call,) = self.communicators.tear_down(KEY, orderly=True)
        assert call.wait(PATIENCE) and call.error is None, call.error
        assert not self.died


def until(fact: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not fact():
        assert time.monotonic() < end, f"not within {PATIENCE:g} s"
        threading.Event().wait(0.0002)


def brought(rank: int, dtype: NcclDataType, count: int = 1000) -> NDArray[Any]:
    """Small numbers, whose sum, product and average are exact in every type."""
    return (np.arange(count) % 5 + 1 + 2 * rank).astype(to_numpy(DType[dtype.name]))


EXPECTED: dict[NcclOperation, Callable[[Any, Any], Any]] = {
    NcclOperation.SUM: lambda a, b: a + b,
    NcclOperation.PRODUCT: lambda a, b: a * b,
    NcclOperation.MAX: np.maximum,
    NcclOperation.MIN: np.minimum,
    NcclOperation.AVERAGE: lambda a, b: a + (b - a) // 2,  # they are 2 apart
}


def a_version_and_ids_and_a_communicator_of_one_rank(rank: Rank) -> None:
    version = rank.nccl.version()
    rank.notes.append(f"{rank.nccl.name}, NCCL {version}")
    assert version >= OLDEST
    one, other = rank.nccl.create_unique_id(), rank.nccl.create_unique_id()
    assert len(one) == len(other) == 128 and one != other
    making = rank.begin(1)
    until(lambda: making.done)
    (made,) = making.result()
    rank.communicators.store(KEY, (made,))
    value = brought(0, NcclDataType.FLOAT32)
    assert (rank.all_reduce(made, value, NcclOperation.SUM, NcclDataType.FLOAT32) == value).all()
    rank.end()
    with pytest.raises(NcclUsageError):
        rank.nccl.is_ready(made.handle)


def all_types_and_operations(rank: Rank) -> None:
    made = rank.make()
    differing = []
    for dtype in NcclDataType:
        for op, expect in EXPECTED.items():
            both = [brought(one, dtype) for one in range(2)]
            found = rank.all_reduce(made, both[rank.rank], op, dtype)
            if not (found == expect(*both).astype(found.dtype)).all():
                differing.append(f"{op.name} of {dtype.name}: {found[:8]} instead of {expect(*both)[:8]}")
    assert not differing, differing
    rank.end()


def a_large_value_and_one_that_is_reduced_in_place_and_an_empty_one(rank: Rank) -> None:
    made = rank.make()
    both = [brought(one, NcclDataType.FLOAT32, ROOM // 4) for one in range(2)]
    total = both[0] + both[1]
    for _ in range(3):
        assert (rank.all_reduce(made, both[rank.rank], NcclOperation.SUM, NcclDataType.FLOAT32) == total).all()
    rank.put(both[rank.rank], rank.send)
    buffers = NcclBuffers(rank.send, rank.send, total.size, NcclDataType.FLOAT32)
    made.issue(lambda handle: rank.nccl.all_reduce(buffers, NcclOperation.SUM, handle, rank.stream))
    assert (rank.get(rank.send, total) == total).all()
    nothing = NcclBuffers(rank.send, rank.receive, 0, NcclDataType.FLOAT32)
    made.issue(lambda handle: rank.nccl.all_reduce(nothing, NcclOperation.SUM, handle, rank.stream))
    rank.wait()
    rank.check_usable(made)
    rank.end()


def reduce_and_broadcast_from_and_to_either_rank(rank: Rank) -> None:
    made = rank.make()
    both = [brought(one, NcclDataType.INT32) for one in range(2)]
    buffers = NcclBuffers(rank.send, rank.receive, both[0].size, NcclDataType.INT32)
    for root in range(2):
        rank.put(both[rank.rank], rank.send)
        rank.put(np.zeros_like(both[0]), rank.receive)
        at = root  # of this round
        made.issue(lambda handle, at=at: rank.nccl.reduce(buffers, NcclOperation.SUM, at, handle, rank.stream))  # type: ignore[misc]
        found = rank.get(rank.receive, both[0])
        assert rank.rank != root or (found == both[0] + both[1]).all()
        made.issue(lambda handle, at=at: rank.nccl.broadcast(buffers, at, handle, rank.stream))  # type: ignore[misc]
        assert (rank.get(rank.receive, both[0]) == both[root]).all()
    rank.end()


def rows_are_gathered_and_scattered_in_place_too(rank: Rank) -> None:
    made, dtype = rank.make(), NcclDataType.INT32
    both = [brought(one, dtype) for one in range(2)]
    joined, own = np.concatenate(both), rank.rank * both[0].nbytes
    for send in (rank.send, rank.receive + own):
        rank.put(np.zeros_like(joined), rank.receive)
        rank.put(both[rank.rank], send)
        buffers = NcclBuffers(send, rank.receive, both[0].size, dtype)
        made.issue(lambda handle, buffers=buffers: rank.nccl.all_gather(buffers, handle, rank.stream))  # type: ignore[misc]
        assert (rank.get(rank.receive, joined) == joined).all()
    whole = [brought(one, dtype, joined.size) for one in range(2)]
    piece = np.split(whole[0] + whole[1], 2)[rank.rank]
    for receive in (rank.receive, rank.send + own):
        rank.put(whole[rank.rank], rank.send)
        buffers = NcclBuffers(rank.send, receive, piece.size, dtype)
        made.issue(
            lambda handle, buffers=buffers: rank.nccl.reduce_scatter(buffers, NcclOperation.SUM, handle, rank.stream)  # type: ignore[misc]
        )
        assert (rank.get(receive, piece) == piece).all()
    rank.end()


def what_is_called_in_a_group_is_carried_out_together(rank: Rank) -> None:
    made, dtype, nccl = rank.make(), NcclDataType.INT32, rank.nccl
    both = [brought(one, dtype) for one in range(2)]
    cuts = [slice(0, 300), slice(300, 1000)]  # the shares of the two ranks

    def run(calls: list[Callable[[int, int], None]]) -> None:
        def issue(handle: int) -> None:
            nccl.group_start()
            try:
                for call in calls:
                    call(handle, rank.stream)
            finally:
                nccl.group_end()

        made.issue(issue)

    def buffers(cut: slice) -> NcclBuffers:
        return NcclBuffers(rank.send + 4 * cut.start, rank.receive + 4 * cut.start, cut.stop - cut.start, dtype)

    def block(address: int, start: int, count: int) -> NcclBlock:
        return NcclBlock(address + 4 * start, count, dtype)

    rank.put(both[rank.rank], rank.send)
    run([partial(nccl.broadcast, buffers(cut), root) for root, cut in enumerate(cuts)])
    expected = np.concatenate([both[root][cut] for root, cut in enumerate(cuts)])
    assert (rank.get(rank.receive, expected) == expected).all()
    run([partial(nccl.reduce, buffers(cut), NcclOperation.SUM, root) for root, cut in enumerate(cuts)])
    own = cuts[rank.rank]
    assert (rank.get(rank.receive, expected)[own] == (both[0] + both[1])[own]).all()
    other = 1 - rank.rank
    sent, received = (300, 700)[rank.rank], (300, 700)[other]
    rank.put(np.zeros_like(expected), rank.receive)
    run(
        [
            partial(nccl.send, block(rank.send, 0, 100), other),
            partial(nccl.send, block(rank.send, 100, sent - 100), other),
            partial(nccl.recv, block(rank.receive, 0, 100), other),
            partial(nccl.recv, block(rank.receive, 100, received - 100), other),
        ]
    )
    found = rank.get(rank.receive, expected)
    assert (found[:received] == both[other][:received]).all() and not found[received:].any()
    rank.end()


def an_abort_while_a_kernel_waits_for_the_other_rank(rank: Rank) -> None:
    made = rank.make()
    rank.check_usable(made)  # whatever NCCL connects at the first collective is connected
    rank.meet()
    if rank.rank == 0:
        rank.launch(made)
        rank.cuda.record(rank.event, rank.stream)
        for _ in range(200):
            assert not rank.cuda.is_event_done(rank.event), "it waits for the other rank"
            made.check()
        rank.notes.append(f"the abort of a waiting kernel took {rank.abort():.3f} s")
        until(lambda: rank.cuda.is_event_done(rank.event))
        with pytest.raises(NcclError):
            rank.launch(made)
        rank.tell("aborted")
    else:
        assert rank.hear() == "aborted"
        try:
            made.check()
            rank.notes.append("the other rank is not told")
        except NcclError as error:
            rank.notes.append(f"the other rank is told: {type(error).__name__}: {error}")
        rank.abort()
    assert not rank.died
    rank.check_usable(rank.make())
    rank.end()


def an_abort_of_a_first_collective_that_waits_for_the_other_rank(rank: Rank) -> None:
    """NCCL connects its ranks at the first collective: a binding that blocks waits within the call."""
    made = rank.make()
    rank.meet()
    if rank.rank == 0:
        raised: list[BaseException] = []

        def call() -> None:
            rank.cuda.set_device(0)
            called.set()
            try:
                rank.launch(made)
            except BaseException as error:
                raised.append(error)

        called = threading.Event()
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        assert called.wait(PATIENCE)
        threading.Event().wait(0.2)  # into the call, or through it: both are right
        rank.notes.append(f"when it is aborted the call {'has returned' if not thread.is_alive() else 'waits'}")
        took = rank.abort()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the call that was aborted has not returned"
        rank.notes.append(f"the abort took {took:.3f} s; the call: {raised[0] if raised else 'no error'!s}")
        assert not raised or isinstance(raised[0], NcclError), raised
        rank.wait()
        rank.tell("aborted")
    else:
        assert rank.hear() == "aborted"
        rank.abort()
    assert not rank.died
    rank.check_usable(rank.make())
    rank.end()


def an_init_is_polled_until_the_other_rank_comes(rank: Rank) -> None:
    if not rank.nccl.capabilities.nonblocking:
        if rank.rank == 0:
            with pytest.raises(NcclUsageError):
                rank.nccl.init(2, bytes(128), 0, blocking=False)
        return
    unique_id = rank.share_id()
    if rank.rank == 0:
        handle = rank.nccl.init(2, unique_id, 0, blocking=False)
        for _ in range(100):
            assert not rank.nccl.is_ready(handle), "the other rank has not come"
            threading.Event().wait(0.002)
        rank.tell("come")
    else:
        assert rank.hear() == "come"
        handle = rank.nccl.init(2, unique_id, 1, blocking=False)
    until(lambda: rank.nccl.is_ready(handle))
    rank.check_usable(Communicator(rank.nccl, handle, 0))
    rank.meet()
    rank.nccl.destroy(handle)


def an_init_that_is_given_up(rank: Rank) -> None:
    """Where the binding cannot stop it, the worker would end: this process is to end, too."""
    if rank.rank:
        return
    making = rank.begin()
    threading.Event().wait(0.2)  # under way, or about to be: both are right
    assert not making.done
    making.cancel()
    until(lambda: making.done or bool(rank.died))
    if rank.nccl.capabilities.nonblocking:
        with pytest.raises(NcclError):
            making.result()
        rank.communicators.close()  # after the abort
        assert not rank.died
    else:
        assert not making.done
        (why,) = rank.died
        rank.notes.append(why)


def an_abort_behind_a_kernel_that_hangs(rank: Rank) -> None:
    """A kernel of somebody else holds up the stream. The abort returns in time, or the worker would end."""
    gates, made = Gates(), rank.make()
    rank.check_usable(made)
    rank.meet()
    if rank.rank == 0:
        with gates.closed(rank.stream):
            rank.launch(made)
            (call,) = rank.communicators.tear_down(KEY, orderly=False)
            until(lambda: call.done or bool(rank.died))
            rank.notes.append(rank.died[0] if rank.died else "it has returned all the same")
        until(lambda: call.done)
        rank.tell("aborted")
    else:
        assert rank.hear() == "aborted"
        rank.abort()


Fact = Callable[[Rank], None]
# Those of one line are played by the same two processes, one after another until one fails.
RUNS: tuple[tuple[Fact, ...], ...] = (
    (
        a_version_and_ids_and_a_communicator_of_one_rank,
        all_types_and_operations,
        a_large_value_and_one_that_is_reduced_in_place_and_an_empty_one,
        reduce_and_broadcast_from_and_to_either_rank,
        rows_are_gathered_and_scattered_in_place_too,
        what_is_called_in_a_group_is_carried_out_together,
        an_init_is_polled_until_the_other_rank_comes,
    ),
    (
        an_abort_while_a_kernel_waits_for_the_other_rank,
        an_abort_of_a_first_collective_that_waits_for_the_other_rank,
        an_init_that_is_given_up,
    ),
    (an_abort_behind_a_kernel_that_hangs,),
)
