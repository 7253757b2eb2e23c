"""A rank over gRPC alone: what it sends to a scripted worker, and what it makes of every kind of answer."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import grpc
import numpy as np
import pytest

import collectived as cd
from collectived_proto import codec
from collectived_proto.error_status import to_status
from collectived_proto.errors import Code, CollectiveError, InvalidArgumentError, error_class, error_from_verdict
from collectived_proto.types import GroupInfo, Layout, LeafPlacement, Member, Pack, Verdict
from collectived_proto.v1 import worker_pb2, worker_pb2_grpc

GENERATION = 100
Replies = Iterator[worker_pb2.SubmitReply]
Answer = Callable[[worker_pb2.SubmitHeader, bytes], Replies]


class RemoteWorker(worker_pb2_grpc.WorkerServicer):
    """A worker of one rank that has no door, whose other ranks give the same values as this one.

    Attributes:
        answer: makes the replies to a submission; may raise a CollectiveError.
        heard: headers of the submissions, by arrival. values: their bytes, by instance. chunks: sizes of data messages.
    """

    def __init__(self, address: str = "127.0.0.1:0", door: str = "") -> None:
        self.door = door
        self.size = 2
        self.heard: list[worker_pb2.SubmitHeader] = []
        self.values: dict[int, bytes] = {}
        self.chunks: list[int] = []
        self.answer: Answer = self.sum
        self.aborted: list[str] = []
        self.on_abort: Callable[[], object] = lambda: None
        self.left = 0
        self.unseen: Verdict | None = None
        self.opened: list[worker_pb2.OpenSessionRequest] = []
        self.metadata: set[str] = set()
        self.ended = threading.Event()
        self.changed = threading.Condition()
        self.prepared = 0
        self.server = grpc.server(ThreadPoolExecutor(80))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server)
        port = self.server.add_insecure_port(address)
        self.address = address.replace(":0", f":{port}")
        self.server.start()

    def close(self) -> None:
        self.ended.set()
        self.server.stop(None).wait()

    def until(self, fact: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(fact, 10)

    def note(self) -> None:
        with self.changed:
            self.changed.notify_all()

    # What the client calls

    def OpenSession(self, request: worker_pb2.OpenSessionRequest, context: Any) -> Iterator[worker_pb2.SessionEvent]:
        self.opened.append(request)
        self.metadata.update(value for key, value in context.invocation_metadata() if key == "authorization")
        ended = threading.Event()
        context.add_callback(ended.set)
        yield worker_pb2.SessionEvent(
            opened=worker_pb2.SessionOpened(
                session=b"secret", worker="/job:worker/task:3", devices=[device(0)], door=self.door, token=b"t" * 16
            )
        )
        ended.wait()

    def Join(self, request: worker_pb2.JoinRequest, context: Any) -> Iterator[worker_pb2.JoinEvent]:
        self.size = request.max_size
        members = tuple(Member(rank, device(rank), 3, "there", 10 + rank) for rank in range(self.size))
        group = codec.group_to_proto(GroupInfo(request.name, 7, GENERATION, members))
        yield worker_pb2.JoinEvent(joined=worker_pb2.Joined(group=group, rank=request.rank))

    def Prepare(self, request: worker_pb2.PrepareRequest, context: Any) -> worker_pb2.PrepareReply:
        """Every leaf is a pack, last leaves first."""
        packs: list[Pack] = []
        leaves = codec.collective_from_proto(request.collective).leaves
        at = 0
        for leaf in reversed(leaves):
            packs.append(Pack(leaf.dtype, leaf.dtype, leaf.count, at, at))
            at += -(-leaf.nbytes // 64) * 64
        places = tuple(LeafPlacement(len(leaves) - 1 - index, 0) for index in range(len(leaves)))
        self.prepared += 1
        return worker_pb2.PrepareReply(
            id=self.prepared, layout=codec.layout_to_proto(Layout(tuple(packs), places, at, at))
        )

    def Submit(self, requests: Iterator[worker_pb2.SubmitRequest], context: Any) -> Replies:
        header = next(requests).header
        chunks = [request.data for request in requests]
        self.chunks.extend(map(len, chunks))
        value = b"".join(chunks)
        self.heard.append(header)
        self.values[header.instance] = value
        self.note()
        try:
            yield from self.answer(header, value)
        except CollectiveError as error:
            context.abort_with_status(to_status(error))

    def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortReply:
        self.aborted.append(request.reason)
        self.note()
        self.on_abort()
        return worker_pb2.AbortReply()

    def Leave(self, request: worker_pb2.LeaveRequest, context: Any) -> worker_pb2.LeaveReply:
        self.left += 1
        self.note()
        return worker_pb2.LeaveReply(unseen=codec.verdict_to_proto(self.unseen) if self.unseen else None)

    # Answers

    def sum(self, header: worker_pb2.SubmitHeader, value: bytes) -> Replies:
        """The value times the size of the group, for float64; leaf by leaf, last first."""
        leaves = header.collective.leaves
        ends = np.cumsum([0, *(8 * int(np.prod(leaf.shape)) for leaf in leaves)])
        for index in reversed(range(len(leaves))):
            part = np.frombuffer(value[ends[index] : ends[index + 1]]) * self.size
            yield result([index], [leaves[index]], len(leaves))
            yield worker_pb2.SubmitReply(data=part.tobytes())
        if not leaves:
            yield result([], [], 0)

    def silence(self, header: worker_pb2.SubmitHeader, value: bytes) -> Replies:
        self.ended.wait(20)
        yield from ()


def device(number: int) -> str:
    return f"/job:worker/replica:0/task:3/device:CPU:{number}"


def result(indices: list[int], leaves: Any, total: int) -> worker_pb2.SubmitReply:
    return worker_pb2.SubmitReply(result=worker_pb2.SubmitResult(indices=indices, leaves=leaves, total=total))


def verdict(code: Code, instance: int = 0, successor: int = 0, message: str = "decided") -> Verdict:
    return Verdict("train", 7, GENERATION, code, message, instance, instance, "all_reduce(sum)", successor=successor)


def raising(error: CollectiveError) -> Answer:
    def answer(header: worker_pb2.SubmitHeader, value: bytes) -> Replies:
        raise error
        yield

    return answer


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLLECTIVED_TIMEOUT", "COLLECTIVED_TRANSPORT", "COLLECTIVED_SECRET", "COLLECTIVED_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def worker() -> Iterator[RemoteWorker]:
    made = RemoteWorker()
    yield made
    made.close()


@pytest.fixture
def group(worker: RemoteWorker) -> Iterator[cd.Group]:
    """Rank 0 of 2."""
    with cd.connect(worker.address) as session:
        yield session.join("train", 2, rank=0)


def test_a_call_is_one_submission_with_its_leaves_in_order(worker: RemoteWorker, group: cd.Group) -> None:
    value: Any = {"b": np.arange(6.0).reshape(2, 3)[:, ::2], "a": [1.5, None]}
    found = group.all_reduce("sum", value)
    assert found["b"].tolist() == [[0, 4], [6, 10]] and found["a"] == [3.0, None]
    found["b"][:] = 1
    group.barrier(cd.CommunicationOptions(timeout_seconds=30))
    first, second = worker.heard
    assert (first.session, first.key, first.rank, first.generation) == (b"secret", 7, 0, GENERATION)
    assert [leaf.path for leaf in first.collective.leaves] == ["['a'][0]", "['b']"]
    assert first.collective.site.startswith("test_channel.py:")
    assert np.frombuffer(worker.values[0]).tolist() == [1.5, 0, 2, 3, 5]
    assert (first.instance, second.instance, first.timeout_seconds) == (0, 1, 0)
    assert 25 < second.timeout_seconds <= 30, "what is left of it"


def test_values_go_in_chunks_of_at_most_a_mebibyte(worker: RemoteWorker, group: cd.Group) -> None:
    value: Any = np.arange(300_000.0)
    assert np.array_equal(group.all_reduce("sum", [value, 1.0, value])[2], 2 * value)
    assert len(worker.values[0]) == sum(worker.chunks) == 8 * 600_001
    assert worker.chunks[:4] == [1 << 20] * 4, "filled across leaves"


def test_only_the_root_of_a_broadcast_sends_its_value(worker: RemoteWorker, group: cd.Group) -> None:
    assert group.broadcast(np.ones(3), root=0).tolist() == [2, 2, 2]
    with pytest.raises(cd.errors.CollectiveError):
        group.broadcast(np.ones(3), root=1)
    assert [len(worker.values[number]) for number in range(2)] == [24, 0]


def test_inputs_may_change_at_once_and_results_are_the_callers_own(worker: RemoteWorker, group: cd.Group) -> None:
    go = threading.Event()
    worker.answer = lambda header, value: (go.wait(10), worker.sum(header, value))[1]
    mine = np.ones(1000)
    works = [group.all_reduce("sum", mine, async_op=True) for _ in range(3)]
    mine[:] = 5
    go.set()
    results = [work.result() for work in works]
    results[0][:] = 7
    assert [found[0] for found in results] == [7, 2, 2]


def test_packs_are_told_as_they_come(worker: RemoteWorker, group: cd.Group) -> None:
    seen: list[str] = []
    go = [threading.Event() for _ in range(3)]

    def slowly(header: worker_pb2.SubmitHeader, value: bytes) -> Replies:
        for number, reply in enumerate(worker.sum(header, value)):
            if number % 2 == 0:
                assert go[number // 2].wait(10)
            yield reply

    worker.answer = slowly
    work = group.all_reduce("sum", [1.0, 2.0, 3.0], async_op=True)
    go[0].set()
    for path, leaf in work.as_completed():
        seen.append(f"{path}={leaf}")
        if len(seen) < 3:
            assert not work.done()
            go[len(seen)].set()
    assert seen == ["(2,)=6.0", "(1,)=4.0", "(0,)=2.0"]


def test_who_waits_to_join_is_known_as_of_the_collective_whose_result_was_taken(
    worker: RemoteWorker, group: cd.Group
) -> None:
    later = threading.Event()

    def answer(header: worker_pb2.SubmitHeader, value: bytes) -> Replies:
        reply = result([], [], 0)
        reply.waiting = [0, 2][header.instance] if header.instance < 2 else 5
        yield reply
        if header.instance == 0:
            assert later.wait(10)

    worker.answer = answer
    first, second = (group.barrier(async_op=True) for _ in range(2))
    assert second.exception(10) is None
    later.set()
    first.result(10)
    assert group.waiting == 0
    second.result(10)
    assert group.waiting == 2
    group.send(1.0, 1)
    assert group.waiting == 2, "of messages others know nothing"


# What a worker refuses alone


def test_a_call_that_no_rank_can_do_gives_its_number_back(worker: RemoteWorker, group: cd.Group) -> None:
    worker.answer = raising(error_class(Code.UNIMPLEMENTED)("not today"))
    with pytest.raises(cd.errors.UnimplementedError, match="not today") as caught:
        group.all_reduce("sum", 1.0)
    assert not caught.value.rejoin and caught.value.verdict is None
    worker.answer = worker.sum
    assert group.all_reduce("sum", 1.0) == 2.0
    assert [header.instance for header in worker.heard] == [0, 0] and worker.aborted == []


def test_an_argument_that_is_refused_on_one_rank_alone_is_no_invalid_argument(
    worker: RemoteWorker, group: cd.Group
) -> None:
    worker.answer = raising(InvalidArgumentError("8 bytes came for a value of 9 bytes"))
    for _ in range(2):
        with pytest.raises(
            cd.errors.InternalError, match="refuses what it had prepared itself: 8 bytes came"
        ) as caught:
            group.all_reduce("sum", 1.0)
        assert caught.value.rejoin and not isinstance(caught.value, ValueError)
    worker.until(lambda: len(worker.aborted) == 1)
    assert len(worker.heard) == 1, "so that all ranks choose alike, the generation is over for all"


def test_a_refusal_with_later_calls_in_flight_ends_the_generation_for_all(
    worker: RemoteWorker, group: cd.Group
) -> None:
    go = threading.Event()

    def answer(header: worker_pb2.SubmitHeader, value: bytes) -> Replies:
        if header.instance == 0:
            go.wait(10)
            raise error_class(Code.RESOURCE_EXHAUSTED)("no memory")
        yield from worker.silence(header, value)

    worker.answer = answer
    works = [group.barrier(async_op=True) for _ in range(2)]
    worker.until(lambda: len(worker.heard) == 2)
    go.set()
    for work in works:
        with pytest.raises(cd.errors.ResourceExhaustedError, match="no memory"):
            work.result()
    worker.until(lambda: len(worker.aborted) == 1)
    assert "no memory" in worker.aborted[0]
    with pytest.raises(cd.errors.ResourceExhaustedError):
        group.barrier()


# What was decided about the group


def test_a_verdict_is_raised_and_later_calls_get_it_too(worker: RemoteWorker, group: cd.Group) -> None:
    bare = Member(1, "", 0, "", 0, "", 4, "barrier()", "a.py:1", 2.5)
    decided = Verdict("train", 7, GENERATION, Code.UNAVAILABLE, "rank 1 is lost", 0, 0, missing=(bare,))
    worker.answer = raising(error_from_verdict(decided))
    for _ in range(2):
        with pytest.raises(cd.errors.UnavailableError, match="rank 1 is lost") as caught:
            group.all_reduce("sum", 1.0)
        assert caught.value.rejoin and caught.value.missing[0].host == "there"
    assert len(worker.heard) == 1


def test_after_a_mismatch_the_group_goes_on_in_the_successor(worker: RemoteWorker, group: cd.Group) -> None:
    assert group.all_reduce("sum", 1.0) == 2.0
    worker.answer = raising(InvalidArgumentError("they differ", verdict=verdict(Code.INVALID_ARGUMENT, 1, 101)))
    with pytest.raises(InvalidArgumentError):
        group.all_reduce("sum", 1.0)
    worker.answer = worker.sum
    assert group.all_reduce("sum", 1.0) == 2.0 and group.generation == 101
    assert [(header.generation, header.instance) for header in worker.heard] == [(100, 0), (100, 1), (101, 0)]


def test_leaving_raises_what_nobody_was_told(worker: RemoteWorker, group: cd.Group) -> None:
    worker.unseen = verdict(Code.UNAVAILABLE, message="rank 1 is lost")
    with pytest.raises(cd.errors.UnavailableError, match="rank 1 is lost"):
        group.leave()
    assert worker.left == 1


def test_leaving_does_not_overtake_the_word_that_this_rank_has_failed(worker: RemoteWorker, group: cd.Group) -> None:
    """Else the others would hear that it has left in order, and not why."""
    overtaken: list[bool] = []

    def wait_for_leave() -> None:
        with worker.changed:
            overtaken.append(worker.changed.wait_for(lambda: worker.left > 0, 0.3))

    worker.on_abort = wait_for_leave
    worker.answer = raising(error_class(Code.RESOURCE_EXHAUSTED)("no memory"))
    with pytest.raises(cd.errors.ResourceExhaustedError):
        group.all_reduce("sum", 1.0)
    group.leave()
    assert (overtaken, worker.left) == ([False], 1)


def test_leaving_waits_for_what_is_in_flight(worker: RemoteWorker, group: cd.Group) -> None:
    go = threading.Event()
    worker.answer = lambda header, value: (go.wait(10), worker.sum(header, value))[1]
    work = group.all_reduce("sum", 1.0, async_op=True)
    worker.until(lambda: len(worker.heard) == 1)
    leaving = threading.Thread(target=group.leave)
    leaving.start()
    assert worker.left == 0
    go.set()
    leaving.join(10)
    assert (work.result(), worker.left) == (2.0, 1)


# What goes wrong between the two


def replying(*replies: worker_pb2.SubmitReply) -> Answer:
    return lambda header, value: iter(replies)


LEAF = worker_pb2.SubmitResult().leaves.add(dtype="FLOAT64", shape=[1])
SMALL = worker_pb2.SubmitResult().leaves.add(dtype="FLOAT32", shape=[1])
UNKNOWN = worker_pb2.SubmitResult().leaves.add(dtype=77, shape=[1])
WRONG: dict[str, list[worker_pb2.SubmitReply]] = {
    "nothing": [],
    "bytes that were not announced": [worker_pb2.SubmitReply(data=b"x" * 8)],
    "too few bytes": [result([0], [LEAF], 1), worker_pb2.SubmitReply(data=b"x" * 7)],
    "too many bytes": [result([0], [LEAF], 1), worker_pb2.SubmitReply(data=b"x" * 9)],
    "two results at once": [result([0], [LEAF], 1), result([0], [LEAF], 1)],
    "a leaf that is not there": [result([1], [LEAF], 2)],
    "a leaf of another size": [result([0], [SMALL], 1)],
    "a leaf of a type that nobody knows": [result([0], [UNKNOWN], 1)],
    "indices without leaves": [result([0], [], 1)],
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_belong_there_is_a_lost_worker(worker: RemoteWorker, group: cd.Group, case: str) -> None:
    worker.answer = replying(*WRONG[case])
    with pytest.raises(cd.errors.UnavailableError, match="is lost: it (sent something unexpected|ended all_reduce)"):
        group.all_reduce("sum", np.ones(1))
    with pytest.raises(cd.errors.UnavailableError, match="connect and join again"):
        group.barrier()


def test_a_worker_that_hangs_up_is_lost(worker: RemoteWorker, group: cd.Group) -> None:
    worker.answer = worker.silence
    work = group.barrier(async_op=True)
    worker.until(lambda: len(worker.heard) == 1)
    worker.ended.set()
    worker.server.stop(None).wait()
    with pytest.raises(cd.errors.UnavailableError, match="is lost"):
        work.result(10)
    assert group._channel.rank_state.is_over


def test_a_worker_that_does_not_answer_is_given_up_at_the_deadline(worker: RemoteWorker, group: cd.Group) -> None:
    worker.answer = worker.silence
    begin = time.monotonic()
    with pytest.raises(cd.errors.DeadlineExceededError, match=r"did not complete within 0.1 s: worker 3 .* has not"):
        group.barrier(cd.CommunicationOptions(timeout_seconds=0.1))
    assert 0.3 <= time.monotonic() - begin < 5
    worker.until(lambda: len(worker.aborted) == 1)
    with pytest.raises(cd.errors.DeadlineExceededError):
        group.barrier()


def test_an_abort_reaches_the_worker_before_it_returns(worker: RemoteWorker, group: cd.Group) -> None:
    worker.answer = worker.silence
    work = group.barrier(async_op=True)
    group.abort("enough")
    group.abort("again")
    assert worker.aborted == ["enough"]
    with pytest.raises(cd.errors.AbortedError, match="enough"):
        work.result()


def test_ctrl_c_in_a_wait_aborts_at_once(worker: RemoteWorker, group: cd.Group, delays: Any) -> None:
    worker.answer = worker.silence
    pressed: list[float] = []

    def press() -> None:
        worker.until(lambda: len(worker.heard) == 1)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        group.barrier()
    assert time.monotonic() - pressed[0] < 0.2 + delays.room
    pressing.join()
    worker.until(lambda: worker.aborted == ["interrupted on rank 0"])
    with pytest.raises(cd.errors.AbortedError, match="interrupted on rank 0"):
        group.barrier()


def test_no_rpc_runs_on_the_callers_thread(worker: RemoteWorker) -> None:
    """Ctrl-C inside gRPC's locks would leave them held."""
    session = cd.connect(worker.address)
    found: set[str] = set()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if f"{os.sep}grpc{os.sep}" in frame.f_code.co_filename:
            found.add(f"{frame.f_code.co_filename}: {frame.f_code.co_name}")

    sys.setprofile(watch)
    try:
        with session:
            group = session.join("train", 2, rank=0)
            group.all_reduce("sum", 1.0)
            group.barrier(async_op=True).result()
            worker.answer = raising(error_class(Code.UNIMPLEMENTED)("no more"))
            with pytest.raises(cd.errors.UnimplementedError):
                group.all_reduce("sum", 1.0)
            group.abort("enough")
            with pytest.raises(cd.errors.AbortedError):
                group.leave()
    finally:
        sys.setprofile(None)
    assert found == set()


# Connecting


def test_tcp_asks_for_no_shared_memory_and_shows_the_secret(
    worker: RemoteWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cd.connect(worker.address) as session:
        assert session.transport == "grpc" and repr(session).endswith(": grpc>")
    assert worker.metadata == set()
    monkeypatch.setenv("COLLECTIVED_SECRET", "ours")
    cd.connect(worker.address).close()
    assert [request.local for request in worker.opened] == [False, False]
    assert worker.metadata == {"Bearer ours"}


def test_a_door_that_does_not_open_is_said_once_and_gone_round(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COLLECTIVED_SECRET", "ours")
    folder = tmp_path_factory.mktemp("w")
    far = RemoteWorker(f"unix:{folder}/w", door=f"{folder}/nowhere")
    try:
        with cd.connect(far.address) as session:
            assert session.transport == "grpc"
    finally:
        far.close()
    assert [request.local for request in far.opened] == [True, False] and far.metadata == {"Bearer ours"}
    (record,) = caplog.records
    assert (
        "worker 3 (at " in record.message
        and "cannot be reached at" in record.message
        and "arrays travel over gRPC instead" in record.message
    )
