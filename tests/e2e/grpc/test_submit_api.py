"""The gRPC API by itself, as any client may speak it to a real worker; see `raw.py`."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from tests.waiting import settle

import collectived as cd
from collectived_proto.types import ANY_SOURCE, AllGather, AllReduce, Barrier, Broadcast, Recv, Reduce, ReduceOp, Send
from collectived_proto.v1 import worker_pb2, worker_pb2_grpc


def _load() -> Any:
    name = "raw_grpc_client"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "raw_client.py")
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


raw = _load()
described, data, each, failure = raw.described, raw.data, raw.each, raw.failure
SUM, POST, CHUNK = raw.SUM, raw.POST, raw.CHUNK
Rank = Any  # a raw.Raw that has joined

_names = itertools.count()


@pytest.fixture
def connect() -> Iterator[Callable[[str], Any]]:
    """Makes raw clients, and closes them."""
    made: list[Any] = []

    def make(address: str) -> Any:
        made.append(raw.Raw(address))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def ranks(one_worker: Any, connect: Callable[[str], Any]) -> Callable[[int], list[Rank]]:
    """Joins so many raw clients to a new group of one worker."""

    def join(size: int) -> list[Rank]:
        name = f"raw-{next(_names)}"
        clients = [connect(one_worker.addresses[0]) for _ in range(size)]
        each(lambda rank: clients[rank].join(name, size, rank), range(size))
        return clients

    return join


def refused(code: str, text: str, call: Callable[[], Any]) -> None:
    """The call is refused alone: nothing was decided about the group."""
    got, message, verdict = failure(call)
    assert (got, verdict) == (code, None), message
    assert text in message


def test_a_recv_from_any_rank_says_who_sent_and_ends_alone_when_cancelled_or_late(ranks: Any) -> None:
    first, second = ranks(2)
    anything = described(Recv(ANY_SOURCE), is_open=True)
    late = list(second.call(second.header(anything, instance=POST, timeout_seconds=0.05)))
    assert [reply.withdrawn for reply in late] == [4]
    taken_back = second.call(second.header(anything, instance=POST + 1))
    second.cancel(POST + 1)
    assert [reply.withdrawn for reply in taken_back] == [1]
    waiting = second.call(second.header(anything, instance=POST + 2))
    first.submit(described(Send(1), (2,)), data([3, 4]), instance=POST)
    result = next(iter(waiting)).result
    assert result.source == 0 and result.total == 1


# Values and results


def test_values_are_leaves_in_their_order_and_results_come_pack_by_pack(ranks: Any) -> None:
    message = described(AllReduce(ReduceOp.MEAN), (2,), (0,), (), (3,))
    message.options.bytes_per_pack = 4

    def one(rank: Rank) -> Any:
        mine = data([rank.rank] * 2, [], [10 * rank.rank], [1, 2, 3])
        return rank.submit(message, mine[:5], mine[5:])

    for reply in each(one, ranks(2)):
        assert reply.values == {0: [0.5, 0.5], 1: [], 2: 5.0, 3: [1, 2, 3]}
        assert reply.total == 4 and sorted(reply.packs) == [[0, 1, 2], [3]]


def test_large_values_travel_in_chunks(ranks: Any) -> None:
    count = 3_000_000
    values = np.arange(count, dtype=np.float32)
    mine = values.tobytes()
    chunks = [mine[start : start + CHUNK] for start in range(0, len(mine), CHUNK)]
    for reply in each(lambda rank: rank.submit(described(SUM, (count,)), *chunks), ranks(2)):
        assert reply.value == (2 * values).tolist()


def test_values_of_many_leaves(ranks: Any) -> None:
    shapes = [(index % 5,) for index in range(1000)]
    mine = np.arange(sum(shape[0] for shape in shapes), dtype=np.float32)

    def one(rank: Rank) -> Any:
        return [rank.submit(described(operation, *shapes), mine.tobytes()) for operation in (SUM, AllGather())]

    for summed, gathered in each(one, ranks(2)):
        assert [value for index in range(1000) for value in summed.values[index]] == (2 * mine).tolist()
        assert [gathered.shapes[index] for index in range(1000)] == [[2 * shape[0]] for shape in shapes]


def test_only_the_root_of_a_broadcast_sends_bytes_and_others_take_what_comes(ranks: Any) -> None:
    with_value = described(Broadcast(1), (2,), ())

    def one(rank: Rank) -> Any:
        if rank.rank == 1:
            return [rank.submit(with_value, data([1, 2], [3])) for _ in range(3)]
        return [
            rank.submit(with_value),
            rank.submit(with_value, data([0, 0], [0])),
            rank.submit(described(Broadcast(1), is_open=True)),
        ]

    results = each(one, ranks(2))
    for reply in itertools.chain(*results):
        assert reply.values == {0: [1, 2], 1: 3}
    assert results[0][2].structure == "[*, *]"


def test_who_receives_nothing_is_told_when_all_is_over(ranks: Any) -> None:
    def one(rank: Rank) -> Any:
        return rank.submit(described(Reduce(ReduceOp.SUM, 1), (2,)), data([1, 2])), rank.submit(described(Barrier()))

    first, second = each(one, ranks(2))
    assert (first[0].packs, first[0].total) == ([[]], 0)
    assert second[0].value == [2, 4]
    assert first[1].packs == second[1].packs == [[]]


def test_lengths_that_differ_are_told_with_the_result(ranks: Any) -> None:
    def one(rank: Rank) -> Any:
        rows = rank.rank + 1
        return rank.submit(described(AllGather(), (rows, 2)), data([rank.rank] * 2 * rows))

    for reply in each(one, ranks(3)):
        assert reply.value == [[0, 0], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2]]


# Numbers


def test_sends_and_recvs_have_numbers_of_their_own(ranks: Any) -> None:
    def one(rank: Rank) -> Any:
        if rank.rank:
            got = [rank.submit(described(Recv(0, 5), is_open=True), instance=POST + number) for number in range(2)]
            return [reply.value for reply in got]
        return [
            rank.submit(described(Send(1, 5), (2,)), data([number, 7]), instance=POST + number).packs
            for number in range(2)
        ]

    clients = ranks(2)
    assert each(one, clients) == [[[[]], [[]]], [[0, 7], [1, 7]]]
    for operation, instance in ((SUM, POST), (Send(1), 2)):
        call = described(operation, (1,))
        says = f"cannot be instance {instance}: send and recv are numbered from 2**62"
        refused("INVALID_ARGUMENT", says, lambda: clients[0].submit(call, data([1]), instance=instance))  # noqa: B023


def test_submissions_may_overtake_each_other(ranks: Any) -> None:
    order = [5, 3, 4, 1, 2, 0, *range(11, 5, -1)]

    def one(task: tuple[Rank, int]) -> Any:
        rank, instance = task
        return rank.submit(described(SUM, (1,)), data([instance]), instance=instance).value

    assert each(one, itertools.product(ranks(2), order)) == [[2 * instance] for instance in (*order, *order)]


def test_what_was_decided_comes_with_the_status_and_the_group_goes_on_in_its_successor(ranks: Any) -> None:
    clients = ranks(2)

    def differ(rank: Rank) -> Any:
        count = 1 + rank.rank
        return rank.submit(described(SUM, (count,)), data([1] * count), generation=rank.generation)

    verdicts = []
    for error in each(differ, clients):
        code, message, verdict = raw.told(error)
        assert code == "INVALID_ARGUMENT" and message.startswith("rank 1 differs: ")
        assert verdict is not None and verdict.instance == 0 and verdict.successor
        assert [member.host for member in verdict.differing] == ["host0"]
        verdicts.append(verdict)
    assert verdicts[0] == verdicts[1]
    one = described(SUM, (1,))
    successor = {"generation": verdicts[0].successor, "instance": verdicts[0].next_instance}
    assert [reply.value for reply in each(lambda rank: rank.submit(one, data([1]), **successor), clients)] == [[2], [2]]
    replies = each(lambda rank: rank.submit(one, data([3])), clients)
    assert [reply.value for reply in replies] == [[6], [6]], "without a generation: the one in which the client is"
    refused("FAILED_PRECONDITION", "generation 5 of", lambda: clients[0].submit(one, generation=5))


# Ends


def test_a_rank_that_aborts_ends_the_others_with_its_reason(ranks: Any) -> None:
    first, second = ranks(2)
    waiting = second.call(second.header(described(SUM, (1,))), data([1]))
    settle(first.in_flight)
    first.abort("loss is NaN")
    code, _, verdict = failure(lambda: raw.Reply(waiting))
    assert code == "ABORTED" and verdict is not None and not verdict.successor
    assert "loss is NaN" in verdict.message and [member.pid for member in verdict.missing] == [os.getpid()]
    code, message, _ = failure(lambda: first.submit(described(SUM, (1,)), data([1])))
    assert code == "ABORTED" and "loss is NaN" in message


def test_leaving_is_no_alarm_and_ends_what_others_submit_later(ranks: Any) -> None:
    first, second = ranks(2)
    each(lambda rank: rank.submit(described(Barrier())), (first, second))
    for _ in range(2):
        assert not first.leave().HasField("unseen")
    refused("FAILED_PRECONDITION", "rank 0 has left", lambda: first.submit(described(Barrier())))
    code, _, verdict = failure(lambda: second.submit(described(Barrier())))
    assert code == "ABORTED" and verdict is not None and [member.rank for member in verdict.missing] == [0]


def test_a_deadline_names_who_did_not_come(ranks: Any, delays: Any) -> None:
    first, _ = ranks(2)
    begin = time.monotonic()
    code, _, verdict = failure(lambda: first.submit(described(SUM, (1,)), data([1]), timeout_seconds=0.2))
    assert 0.2 <= time.monotonic() - begin < 0.2 + 0.25 + 0.5 + delays.room
    assert code == "DEADLINE_EXCEEDED" and [member.rank for member in verdict.missing] == [1]


def test_a_client_that_is_slower_than_its_own_deadline_ends_its_collective_for_all(ranks: Any, delays: Any) -> None:
    first, second = ranks(2)
    waiting = second.call(second.header(described(SUM, (3,))), data([1, 2, 3]))
    settle(second.in_flight)
    ended = threading.Event()

    def requests() -> Iterator[worker_pb2.SubmitRequest]:
        yield worker_pb2.SubmitRequest(header=first.header(described(SUM, (3,)), timeout_seconds=0.1))
        yield worker_pb2.SubmitRequest(data=data([1]))
        ended.wait(20)

    begin = time.monotonic()
    try:
        found = [failure(lambda: raw.Reply(call)) for call in (first.stub.Submit(requests(), timeout=20), waiting)]  # noqa: B023
    finally:
        ended.set()
    assert time.monotonic() - begin < 0.1 + 0.25 + 0.5 + delays.room
    for code, _, verdict in found:
        assert code == "DEADLINE_EXCEEDED" and [member.rank for member in verdict.missing] == [0]
        assert "all_reduce(sum) #0 of group" in verdict.message
        assert verdict.message.count("did not complete within 0.1 s") == verdict.message.count("all_reduce(sum)") == 1
    assert found[0][2] == found[1][2]
    assert failure(lambda: first.submit(described(Barrier()), instance=0))[2] == found[0][2], "the generation is over"


def test_a_number_that_is_not_reached_in_time_ends_the_group_from_there_on(ranks: Any) -> None:
    first, second = clients = ranks(2)
    barrier = described(Barrier())
    early = [second.call(second.header(barrier, instance=number)) for number in range(2)]
    code, _, verdict = failure(lambda: first.submit(barrier, instance=1, timeout_seconds=0.1))
    assert code == "DEADLINE_EXCEEDED" and (verdict.instance, verdict.from_instance) == (1, 1)
    assert first.submit(barrier, instance=0).packs == raw.Reply(early[0]).packs == [[]], "what is before it goes on"
    assert failure(lambda: raw.Reply(early[1]))[2] == verdict
    assert [failure(lambda: rank.submit(barrier))[2] for rank in clients] == [verdict] * 2  # noqa: B023


def test_a_send_that_does_not_come_in_time_names_its_sender(ranks: Any) -> None:
    first, second = ranks(2)
    waiting = second.call(second.header(described(Recv(0), is_open=True), instance=POST))
    call = first.header(described(Send(1), (3,)), instance=POST + 1, timeout_seconds=0.1)
    found = [failure(lambda: raw.Reply(one)) for one in (first.call(call, data([1, 2, 3])), waiting)]  # noqa: B023
    for code, _, verdict in found:
        assert code == "DEADLINE_EXCEEDED" and [member.rank for member in verdict.missing] == [0]
        assert "send(to=1, tag=0) on rank 0" in verdict.message


MANY_PACKS = described(SUM, (10,), (10,))
MANY_PACKS.options.packing.num_packs = 1 << 31
MANY_SHARDS = described(SUM, (10,))
MANY_SHARDS.options.all_reduce_spec.add(algorithm="xring", shards=5000, limit=-1)
TOO_MANY: dict[str, tuple[Any, str]] = {
    "num_packs": (MANY_PACKS, "num_packs must be at most 4096, got 2147483648"),
    "shards": (MANY_SHARDS, "shards must be at most 4096, got 5000"),
    "leaves": (described(SUM, *[(0,)] * 65_537), "a value of 65537 leaves, and at most 65536"),
}


@pytest.mark.parametrize("case", TOO_MANY)
def test_more_than_a_worker_carries_out_is_refused_at_once(ranks: Any, case: str, delays: Any) -> None:
    (rank,) = ranks(1)
    collective, says = TOO_MANY[case]
    named = {"session": rank.opened.session, "key": rank.key, "rank": rank.rank}
    begin = time.monotonic()
    refused("INVALID_ARGUMENT", says, lambda: rank.submit(collective))
    prepare = worker_pb2.PrepareRequest(collective=collective, **named)
    refused("INVALID_ARGUMENT", says, lambda: rank.stub.Prepare(prepare, timeout=10))
    assert time.monotonic() - begin < 2 + delays.room
    assert rank.submit(described(SUM, (1,)), data([1])).value == [1]


def test_more_packs_than_elements_are_one(ranks: Any) -> None:
    call = described(SUM, (13,))
    call.options.packing.num_packs = 4096
    for reply in each(lambda rank: rank.submit(call, data(range(13))), ranks(2)):
        assert reply.value == [2 * number for number in range(13)]


def test_a_session_that_ends_takes_its_ranks_along_at_once(
    ranks: Any, connect: Any, one_worker: Any, delays: Any
) -> None:
    first, second = ranks(2)
    observer = connect(one_worker.addresses[0])
    sessions = observer.status().sessions
    waiting = first.call(first.header(described(SUM, (1,))), data([1]))
    halfway = second.call(second.header(described(SUM, (1,)), instance=1), data([1]))
    settle(first.in_flight)
    begin = time.monotonic()
    second.life.cancel()
    code, _, verdict = failure(lambda: raw.Reply(waiting))
    assert time.monotonic() - begin < 1.0 + delays.room
    assert code == "UNAVAILABLE" and [member.rank for member in verdict.missing] == [1]
    refused("UNAVAILABLE", "rank 1 of group", lambda: raw.Reply(halfway))
    refused("UNAVAILABLE", "this session has ended", lambda: second.submit(described(Barrier())))
    settle(lambda: observer.status().sessions == sessions - 1)


def test_what_was_fully_submitted_completes_after_the_end_of_its_client(ranks: Any) -> None:
    first, second = ranks(2)
    submitted = second.call(second.header(described(SUM, (1,))), data([5]))
    settle(first.in_flight)
    second.close()
    assert first.submit(described(SUM, (1,)), data([1])).value == [6] and not submitted.is_active()


def test_a_submission_that_is_cancelled_goes_on_without_its_client(ranks: Any) -> None:
    first, second = clients = ranks(2)
    before = first.status().arena_bytes
    large = described(SUM, (1 << 18,))
    for _ in range(3):
        cancelled = second.call(second.header(large), bytes(1 << 20))
        settle(first.in_flight)
        cancelled.cancel()
        assert first.submit(large, bytes(1 << 20)).total == 1
    replies = each(lambda rank: rank.submit(described(SUM, (1,)), data([2])), clients)
    assert [reply.value for reply in replies] == [[4], [4]]
    for rank in clients:
        rank.leave()
    settle(lambda: not any(group_loop.key == first.key for group_loop in first.status().lanes))
    settle(lambda: first.status().arena_bytes <= before)


# Bad requests


def changed(**fields: Any) -> Any:
    """An all_reduce of float32[2] with these fields of its leaf, or of itself, changed."""
    message = described(SUM, (2,))
    for name, value in fields.items():
        if name == "shape":
            message.leaves[0].shape[:] = value
        elif name == "clear":
            message.ClearField(value)
        else:
            setattr(message.leaves[0], name, value)
    return message


GOOD = described(SUM, (2,))
EMPTY = worker_pb2.SubmitRequest()
HEADER: dict[str, Any] = {}  # stands for a header of GOOD, with these fields
BAD: dict[str, tuple[str, str, list[Any]]] = {
    "nothing": ("INVALID_ARGUMENT", "begins with a header", []),
    "no header": ("INVALID_ARGUMENT", "begins with a header", [data([1, 2])]),
    "neither header nor data": ("INVALID_ARGUMENT", "begins with a header", [EMPTY]),
    "two headers": ("INVALID_ARGUMENT", "after its header a Submit has data alone", [HEADER, HEADER]),
    "a header, then nothing": ("INVALID_ARGUMENT", "has data alone", [HEADER, EMPTY]),
    "too few bytes": ("INVALID_ARGUMENT", "4 bytes came for a value of 8 bytes", [HEADER, data([1])]),
    "no bytes": ("INVALID_ARGUMENT", "0 bytes came for a value of 8 bytes", [HEADER]),
    "too many bytes": ("INVALID_ARGUMENT", "12 bytes came for a value of 8 bytes", [HEADER, data([1, 2, 3])]),
    "one byte too many": ("INVALID_ARGUMENT", "9 bytes came for", [HEADER, data([1, 2]), b"x"]),
    "a large chunk": ("INVALID_ARGUMENT", "a chunk of 1048577 bytes", [HEADER, bytes(CHUNK + 1)]),
    "a huge chunk": ("RESOURCE_EXHAUSTED", "larger than max", [HEADER, bytes(65 << 20)]),
    "another session": ("UNAVAILABLE", "does not know the session", [{"session": b"nobody"}]),
    "no session": ("UNAVAILABLE", "does not know the session", [{"session": b""}]),
    "another rank": ("NOT_FOUND", "not rank 9 of that group", [{"rank": 9}]),
    "another group": ("NOT_FOUND", "not rank 0 of that group", [{"key": 5}]),
    "no operation": ("INVALID_ARGUMENT", "without an operation", [{"collective": changed(clear="all_reduce")}]),
    "a negative length": ("INVALID_ARGUMENT", "negative length", [{"collective": changed(shape=[-2])}]),
    "an unknown type": ("INVALID_ARGUMENT", "data type number 99", [{"collective": changed(dtype=99)}]),
    "no value": ("INVALID_ARGUMENT", "needs a value", [{"collective": described(SUM, is_open=True)}]),
    "an unknown root": ("INVALID_ARGUMENT", "root 9 is not", [{"collective": described(Broadcast(9), (2,))}]),
    "more than there is": ("RESOURCE_EXHAUSTED", "no memory for the value", [{"collective": changed(shape=[1 << 40])}]),
    "more than can be": ("RESOURCE_EXHAUSTED", "no memory", [{"collective": changed(shape=[1 << 60])}]),
    "more than can be said": ("INVALID_ARGUMENT", "2^63 - 1", [{"collective": changed(shape=[1 << 62, 1 << 62])}]),
    "a negative timeout": ("INVALID_ARGUMENT", "timeout_seconds", [{"timeout_seconds": -1.0}]),
    "no timeout": ("INVALID_ARGUMENT", "timeout_seconds", [{"timeout_seconds": float("nan")}]),
    "a number too far ahead": ("RESOURCE_EXHAUSTED", "instance 64 comes before", [{"instance": 64}]),
    "a number far too far ahead": ("RESOURCE_EXHAUSTED", "comes before instance 0", [{"instance": POST - 1}]),
    "another generation": ("FAILED_PRECONDITION", "generation 3", [{"generation": 3}]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused_and_leave_nothing_behind(ranks: Any, case: str) -> None:
    (rank,) = ranks(1)
    code, text, requests = BAD[case]
    before = rank.status().arena_bytes
    sent = [
        rank.header(**{"collective": GOOD, **request}) if isinstance(request, dict) else request for request in requests
    ]
    refused(code, text, lambda: raw.Reply(rank.call(*sent)))
    assert rank.submit(GOOD, data([1, 2]), instance=0).value == [1, 2], "the rank goes on"
    rank.leave()
    settle(lambda: rank.status().arena_bytes <= before)


def test_a_client_that_still_sends_its_value_hears_why_it_is_refused(one_worker: Any, ranks: Any) -> None:
    (rank,) = ranks(1)

    async def submit(channel: grpc.aio.Channel) -> tuple[grpc.StatusCode, str]:
        async def requests() -> AsyncIterator[worker_pb2.SubmitRequest]:
            header = rank.header(changed(shape=[-1]))
            yield worker_pb2.SubmitRequest(header=header)
            for _ in range(5):
                yield worker_pb2.SubmitRequest(data=bytes(CHUNK))

        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            async for _ in worker_pb2_grpc.WorkerStub(channel).Submit(requests()):
                raise AssertionError("it was taken")
        return refusal.value.code(), refusal.value.details() or ""

    async def scenario() -> None:
        async with grpc.aio.insecure_channel(one_worker.addresses[0]) as channel:
            for _ in range(10):
                for code, text in await asyncio.gather(*(submit(channel) for _ in range(2))):
                    assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "[0]: negative length in shape [-1]")

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_rank_with_a_doorbell_does_not_submit_over_grpc(one_worker: Any, connect: Any) -> None:
    client = connect(one_worker.addresses[0])

    def body(session: cd.Session, group: cd.Group) -> None:
        header = client.header(described(Barrier()), session=session._token, key=group.key, rank=group.rank)
        refused("FAILED_PRECONDITION", "submits through that", lambda: raw.Reply(client.call(header)))
        group.barrier()

    one_worker.run_sessions(1, body)
