"""What every adapter of a binding must do, each fact a function; see test_adapters.py."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.fakes.libnccl import Fake, Setting

from collectived_runtime.device.nccl.interface import (
    Nccl,
    NcclBlock,
    NcclBuffers,
    NcclDataType,
    NcclError,
    NcclOperation,
    NcclRemoteError,
    NcclResult,
    NcclTimeoutError,
    NcclUsageError,
    split_count,
)

Fact = Callable[[Nccl, Fake], None]
FACTS: dict[str, Fact] = {}
BIG = (1 << 31) + 5
BUFFERS = NcclBuffers(1, 2, 3, NcclDataType.FLOAT32)
BLOCK = NcclBlock(1, 3, NcclDataType.FLOAT32)


def fact(function: Fact) -> Fact:
    FACTS[function.__name__] = function
    return function


def begun(nccl: Nccl, rank: int = 1) -> int:
    return nccl.init(2, nccl.create_unique_id(), rank, blocking=not nccl.capabilities.nonblocking)


def raised(what: Callable[[], object]) -> NcclError:
    try:
        what()
    except NcclError as error:
        return error
    raise AssertionError("nothing was raised")


@fact
def its_version_is_that_of_the_library(nccl: Nccl, fake: Fake) -> None:
    assert nccl.version() == 22809


@fact
def a_unique_id_has_128_bytes_and_is_another_each_time(nccl: Nccl, fake: Fake) -> None:
    one, other = nccl.create_unique_id(), nccl.create_unique_id()
    assert len(one) == len(other) == 128 and one != other


@fact
def rank_size_and_unique_id_arrive_at_the_library(nccl: Nccl, fake: Fake) -> None:
    blocking = not nccl.capabilities.nonblocking
    lines = fake.called(lambda: nccl.init(5, nccl.create_unique_id(), 3, blocking=blocking))
    assert lines == [f"init size=5 rank=3 id=5a..5a blocking={int(blocking)}"], lines


@fact
def a_communicator_made_without_blocking_is_polled_until_it_is_ready(nccl: Nccl, fake: Fake) -> None:
    with fake.having(Setting.INIT_POLLS, 3):
        if not nccl.capabilities.nonblocking:
            error = raised(lambda: nccl.init(2, nccl.create_unique_id(), 0, blocking=False))
            assert isinstance(error, NcclUsageError)
            return
        communicator = begun(nccl)
    assert [nccl.is_ready(communicator) for _ in range(4)] == [False, False, False, True]


@fact
def what_is_asked_for_arrives_as_it_is(nccl: Nccl, fake: Fake) -> None:
    one, count = begun(nccl), nccl.capabilities.max_count

    def calls() -> None:
        nccl.all_reduce(NcclBuffers(0x10, 0x20, count, NcclDataType.BFLOAT16), NcclOperation.AVERAGE, one, 0x30)
        nccl.reduce(NcclBuffers(0x10, 0x20, 7, NcclDataType.INT64), NcclOperation.MAX, 1, one, 0x30)
        nccl.broadcast(NcclBuffers(0x10, 0x20, 9, NcclDataType.UINT8), 1, one, 0x30)
        nccl.all_gather(NcclBuffers(0x10, 0x20, count, NcclDataType.FLOAT16), one, 0x30)
        nccl.reduce_scatter(NcclBuffers(0x10, 0x20, 8, NcclDataType.FLOAT64), NcclOperation.MIN, one, 0x30)
        nccl.group_start()
        nccl.send(NcclBlock(0x10, count, NcclDataType.UINT8), 0, one, 0x30)
        nccl.recv(NcclBlock(0x20, 11, NcclDataType.INT8), 0, one, 0x30)
        nccl.group_end()

    assert fake.called(calls) == [
        f"all_reduce 0x10 0x20 count={count} type=9 op=4 rank=1 stream=0x30",
        "reduce 0x10 0x20 count=7 type=4 op=2 root=1 rank=1 stream=0x30",
        "broadcast 0x10 0x20 count=9 type=1 root=1 rank=1 stream=0x30",
        f"all_gather 0x10 0x20 count={count} type=6 rank=1 stream=0x30",
        "reduce_scatter 0x10 0x20 count=8 type=8 op=3 rank=1 stream=0x30",
        "group_start",
        f"send 0x10 count={count} type=1 peer=0 rank=1 stream=0x30",
        "recv 0x20 count=11 type=0 peer=0 rank=1 stream=0x30",
        "group_end",
    ]


@fact
def a_count_beyond_31_bits_arrives_whole_or_in_parts_and_never_as_another(nccl: Nccl, fake: Fake) -> None:
    one, most = begun(nccl), nccl.capabilities.max_count

    def calls() -> None:
        for start, count in split_count(BIG, most):
            nccl.all_reduce(NcclBuffers(start, start, count, NcclDataType.INT8), NcclOperation.SUM, one, 0)

    counts = [int(line.split("count=")[1].split()[0]) for line in fake.called(calls)]
    assert sum(counts) == BIG and max(counts) <= most
    if most < BIG:
        whole, block = NcclBuffers(0, 0, BIG, NcclDataType.INT8), NcclBlock(0, BIG, NcclDataType.INT8)
        for call in (
            lambda: nccl.all_reduce(whole, NcclOperation.SUM, one, 0),
            lambda: nccl.all_gather(whole, one, 0),
            lambda: nccl.reduce_scatter(whole, NcclOperation.SUM, one, 0),
            lambda: nccl.send(block, 0, one, 0),
            lambda: nccl.recv(block, 0, one, 0),
        ):
            error = raised(call)
            assert isinstance(error, NcclUsageError) and str(BIG) in str(error)


@fact
def what_the_library_refuses_is_a_typed_error(nccl: Nccl, fake: Fake) -> None:
    one = begun(nccl)
    kinds = {code: NcclError for code in NcclResult if code not in (NcclResult.SUCCESS, NcclResult.IN_PROGRESS)}
    kinds |= {NcclResult.INVALID_ARGUMENT: NcclUsageError, NcclResult.INVALID_USAGE: NcclUsageError}
    kinds |= {NcclResult.REMOTE_ERROR: NcclRemoteError, NcclResult.TIMEOUT: NcclTimeoutError}
    for code, kind in kinds.items():
        with fake.having(Setting.CALL_RESULT, code):
            error = raised(lambda: nccl.all_reduce(BUFFERS, NcclOperation.SUM, one, 0))
            assert type(error) is kind and error.code == code, (code, error)
            for call in (
                lambda: nccl.all_gather(BUFFERS, one, 0),
                lambda: nccl.reduce_scatter(BUFFERS, NcclOperation.SUM, one, 0),
                lambda: nccl.send(BLOCK, 0, one, 0),
                lambda: nccl.recv(BLOCK, 0, one, 0),
                nccl.group_start,
                nccl.group_end,
            ):
                error = raised(call)
                assert type(error) is kind and error.code == code, (code, error)
            error = raised(nccl.create_unique_id)
            assert type(error) is kind and error.code == code, (code, error)
            error = raised(lambda: nccl.init(2, bytes(128), 0, blocking=not nccl.capabilities.nonblocking))
            assert type(error) is kind and error.code == code, (code, error)


@fact
def a_call_in_progress_is_no_error(nccl: Nccl, fake: Fake) -> None:
    one = begun(nccl)
    with fake.having(Setting.CALL_RESULT, NcclResult.IN_PROGRESS):
        nccl.all_reduce(BUFFERS, NcclOperation.SUM, one, 0)
        nccl.group_start()
        nccl.send(BLOCK, 0, one, 0)
        nccl.group_end()
    with fake.having(Setting.ASYNC_RESULT, NcclResult.IN_PROGRESS):
        assert not nccl.is_ready(one)
    assert nccl.is_ready(one)


@fact
def what_has_failed_meanwhile_is_told_when_asked(nccl: Nccl, fake: Fake) -> None:
    one = begun(nccl)
    for code, kind in ((6, NcclRemoteError), (8, NcclTimeoutError), (3, NcclError)):
        with fake.having(Setting.ASYNC_RESULT, code):
            error = raised(lambda: nccl.is_ready(one))
            assert type(error) is kind and error.code == code


@fact
def a_result_that_nobody_knows_is_an_error_with_its_number(nccl: Nccl, fake: Fake) -> None:
    one = begun(nccl)
    with fake.having(Setting.ASYNC_RESULT, 77):
        assert raised(lambda: nccl.is_ready(one)).code == 77


@fact
def a_hanging_abort_keeps_no_other_thread_from_running(nccl: Nccl, fake: Fake) -> None:
    one, other = begun(nccl, 0), begun(nccl, 1)
    with fake.having(Setting.ABORT_HANGS, 1):
        aborting = threading.Thread(target=nccl.abort, args=(one,))
        aborting.start()
        assert nccl.is_ready(other) and aborting.is_alive()
    aborting.join(10)
    assert not aborting.is_alive()


@fact
def a_hanging_init_keeps_no_other_thread_from_running(nccl: Nccl, fake: Fake) -> None:
    made: list[int] = []
    with fake.having(Setting.INIT_HANGS, 1), fake.having(Setting.INIT_POLLS, 0):
        thread = threading.Thread(target=lambda: made.append(begun(nccl)))
        thread.start()
        assert len(nccl.create_unique_id()) == 128
        assert nccl.capabilities.nonblocking or not made
    thread.join(10)
    assert made and nccl.is_ready(made[0])


@fact
def what_has_been_freed_is_refused_and_not_passed_on(nccl: Nccl, fake: Fake) -> None:
    one, other = begun(nccl), begun(nccl)
    assert fake.called(lambda: nccl.abort(one)) == ["abort rank=1"]
    assert fake.called(lambda: nccl.destroy(other)) == ["destroy rank=1"]

    def again() -> None:
        for call in (nccl.abort, nccl.destroy, nccl.is_ready):
            assert isinstance(raised(lambda call=call: call(one)), NcclUsageError)  # type: ignore[misc]
        error = raised(lambda: nccl.all_reduce(BUFFERS, NcclOperation.SUM, other, 0))
        assert isinstance(error, NcclUsageError)

    assert fake.called(again) == []
