"""A rank without a doorbell: in which order its submissions are rung, and what becomes of what its group loop says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from collectived_proto.codec import verdict_to_proto
from collectived_proto.errors import (
    AbortedError,
    Code,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from collectived_proto.ipc import arena, messages
from collectived_proto.types import GroupInfo, Member, Verdict
from collectived_runtime.engine.base.memory_budget import MemoryBudget
from collectived_runtime.worker.remote_ranks import uploads
from collectived_runtime.worker.remote_ranks.in_flight import RemoteInstance
from collectived_runtime.worker.remote_ranks.remote_rank import RemoteRankSession

GENERATION = 100
GROUP = GroupInfo("world", 7, GENERATION, tuple(Member(r, f"CPU:{r}", 0, "here", 10 + r) for r in range(2)))


class Setting:
    """A rank, and its group loop as these tests play it."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.hung_up: list[str] = []
        self.late: list[tuple[int, int, str, float]] = []
        self.budget = MemoryBudget(1 << 30)
        self.remote = RemoteRankSession(
            GROUP, 0, self.budget, self.say, self.hung_up.append, lambda *what: self.late.append(what)
        )

    def say(self, message: bytes) -> None:
        self.said.append(message)
        if messages.parse_type(message) is messages.MessageType.PING:
            self.remote.send(messages.encode_bare(messages.MessageType.PONG))

    @property
    def rung(self) -> list[tuple[int, int]]:
        rings = [
            messages.parse_submit(message)
            for message in self.said
            if messages.parse_type(message) is messages.MessageType.SUBMIT
        ]
        return [(ring.generation, ring.instance) for ring in rings]

    @property
    def released(self) -> list[int]:
        return [
            number
            for message in self.said
            if messages.parse_type(message) is messages.MessageType.RELEASE
            for number in messages.parse_release(message)
        ]

    async def submit(self, instance: int | None, generation: int = 0, post: bool = False) -> RemoteInstance:
        remote, order = self.remote, self.remote.sequencer
        with remote.acquire_stream(post), order.reserve_number(generation, instance, post) as number:
            turn = await order.wait_turn(number, generation, post)
            upload, _ = remote.uploads.acquire(100)
            return remote.start_instance(turn, messages.Submit(turn[0], 1, turn[1], 0.0, True, ((upload, 0),)))

    def done(self, instance: int, *, last: bool = True, slot: int = 0) -> None:
        self.remote.send(messages.Completion(instance, 0, last, bool(slot), 1, 0, slot).encode())
        self.remote.process_messages()

    def fail(self, instance: int, verdict: Verdict) -> None:
        self.remote.send(messages.encode_failed(instance, verdict_to_proto(verdict).SerializeToString()))
        self.remote.process_messages()


def verdict(code: Code, from_instance: int, successor: int = 0, generation: int = GENERATION) -> Verdict:
    return Verdict("world", 7, generation, code, "decided", from_instance, successor=successor)


Story = Callable[[Setting], Awaitable[None]]


def story(test: Story) -> Callable[[], None]:
    """A test in an event loop of its own."""

    async def told() -> None:
        async with asyncio.timeout(20):
            await test(Setting())

    def run() -> None:
        asyncio.run(told())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def settle() -> None:
    """Lets everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


@story
async def test_submissions_are_rung_in_the_order_of_their_numbers(setting: Setting) -> None:
    late = [asyncio.ensure_future(setting.submit(instance)) for instance in (2, 1, 3)]
    await settle()
    assert setting.rung == []
    await setting.submit(0)
    await asyncio.gather(*late)
    assert setting.rung == [(GENERATION, instance) for instance in range(4)]


@story
async def test_sends_and_recvs_are_numbered_apart(setting: Setting) -> None:
    early = asyncio.ensure_future(setting.submit(messages.P2P_BASE + 1, post=True))
    await setting.submit(0)
    await settle()
    await setting.submit(None, post=True)
    await early
    assert [instance for _, instance in setting.rung] == [0, messages.P2P_BASE, messages.P2P_BASE + 1]


@story
async def test_what_has_no_number_is_the_next(setting: Setting) -> None:
    for instance in (None, 1, None):
        await setting.submit(instance)
    assert [instance for _, instance in setting.rung] == [0, 1, 2]


@story
async def test_a_number_is_taken_once(setting: Setting) -> None:
    await setting.submit(0)
    waiting = asyncio.ensure_future(setting.submit(2))
    await settle()
    for instance in (0, 2):
        with pytest.raises(FailedPreconditionError, match=f"instance {instance} has been submitted already"):
            await setting.submit(instance)
    waiting.cancel()
    await settle()
    again = asyncio.ensure_future(setting.submit(2))
    await setting.submit(1)
    await again
    assert [instance for _, instance in setting.rung] == [0, 1, 2], "what was withdrawn may come again"


@story
async def test_no_more_than_so_many_are_in_flight(setting: Setting) -> None:
    with pytest.raises(ResourceExhaustedError, match=f"instance {messages.MAX_OUTSTANDING} comes before instance 0"):
        await setting.submit(messages.MAX_OUTSTANDING)
    for _ in range(messages.MAX_OUTSTANDING):
        await setting.submit(None)
    with pytest.raises(ResourceExhaustedError, match="64 collectives of group 'world' are in flight"):
        await setting.submit(None)
    await setting.submit(None, post=True)
    setting.done(0)
    await setting.submit(None)


@story
async def test_sends_and_recvs_have_a_limit_of_their_own(setting: Setting) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "MAX_P2P_OUTSTANDING", 3)
        for _ in range(3):
            await setting.submit(None, post=True)
        with pytest.raises(ResourceExhaustedError, match="3 sends and recvs of group 'world' are in flight"):
            await setting.submit(None, post=True)
        await setting.submit(None)


@story
async def test_an_unknown_generation_is_refused(setting: Setting) -> None:
    with pytest.raises(FailedPreconditionError, match="generation 101 of group 'world' is not known"):
        await setting.submit(0, GENERATION + 1)


@story
async def test_results_are_released_when_they_have_been_read_or_nobody_will(setting: Setting) -> None:
    read, abandoned = await setting.submit(0), await setting.submit(1)
    setting.done(0, slot=8)
    done = await read.next_completion()
    assert done is not None and done.slot == 8 and setting.released == []
    setting.remote.abandon(read)
    assert setting.released == [8]
    setting.remote.abandon(abandoned)
    assert setting.released == [8], "it still runs"
    setting.done(1, last=False, slot=9)
    assert setting.released == [8]
    setting.done(1, slot=9)
    assert setting.released == [8, 9]


@story
async def test_memory_of_a_value_serves_again_when_its_instance_has_ended(setting: Setting) -> None:
    await setting.submit(0)
    used = setting.budget.used
    setting.done(0)
    await setting.submit(1)
    assert setting.budget.used == used
    setting.fail(1, verdict(Code.ABORTED, 1))
    setting.remote.close()
    await settle()
    assert setting.budget.used == 0


@story
async def test_a_verdict_ends_what_it_covers_and_what_waits_behind_it(setting: Setting) -> None:
    flight = await setting.submit(0)
    waiting = asyncio.ensure_future(setting.submit(2))
    await settle()
    setting.fail(0, verdict(Code.UNAVAILABLE, 0))
    for ended in (flight.next_completion(), waiting):
        with pytest.raises(UnavailableError, match="decided"):
            await ended
    assert len(setting.rung) == 1


@story
async def test_what_was_late_ends_with_the_verdict_that_all_ranks_get(setting: Setting) -> None:
    await setting.submit(0)
    late = [
        asyncio.ensure_future(setting.remote.expire_submission((GENERATION, instance), "barrier()", 0.1))
        for instance in (1, messages.P2P_BASE)
    ]
    await settle()
    assert setting.late == [(GENERATION, 1, "barrier()", 0.1), (GENERATION, messages.P2P_BASE, "barrier()", 0.1)]
    decided = verdict(Code.DEADLINE_EXCEEDED, 1)
    setting.fail(2, decided)
    await settle()
    assert not any(one.done() for one in late), "that was of another one"
    for instance, one in zip((1, messages.P2P_BASE), late, strict=True):
        setting.fail(instance, decided)
        with pytest.raises(DeadlineExceededError) as caught:
            await one
        assert caught.value.verdict == decided
    assert setting.rung == [(GENERATION, 0)]


@story
async def test_what_was_late_ends_with_its_rank(setting: Setting) -> None:
    late = asyncio.ensure_future(setting.remote.expire_submission((GENERATION, 0), "barrier()", 0.1))
    await settle()
    setting.remote.close()
    for waiting in (late, setting.remote.expire_submission((GENERATION, 0), "barrier()", 0.1)):
        with pytest.raises(UnavailableError, match="has lost its place"):
            await waiting


@story
async def test_the_successor_begins_when_the_client_has_been_given_the_verdict(setting: Setting) -> None:
    flight = await setting.submit(0)
    decided = verdict(Code.INVALID_ARGUMENT, 0, successor=GENERATION + 1)
    setting.fail(0, decided)
    with pytest.raises(InvalidArgumentError):
        await flight.next_completion()
    await setting.submit(None)
    assert setting.rung[-1] == (GENERATION, 1), "it does not know yet"
    setting.fail(1, decided)
    setting.remote.on_verdict_delivered(decided)
    await setting.submit(None)
    assert setting.rung[-1] == (GENERATION + 1, 0)


@story
async def test_a_new_generation_waits_until_the_old_one_has_ended(setting: Setting) -> None:
    early, failed = await setting.submit(0), await setting.submit(1)
    decided = verdict(Code.INVALID_ARGUMENT, 1, successor=GENERATION + 1)
    setting.fail(1, decided)
    setting.remote.on_verdict_delivered(decided)
    following = asyncio.ensure_future(setting.submit(0, GENERATION + 1))
    await settle()
    assert len(setting.rung) == 2, "completions do not say their generation"
    setting.done(0)
    await following
    setting.done(0)
    assert (early.is_over, failed.is_over, following.result().is_over) == (True, True, True)


@story
async def test_leaving_tells_what_the_client_has_not_been_given(setting: Setting) -> None:
    await setting.submit(0)
    setting.done(0)
    decided = verdict(Code.UNAVAILABLE, 0)
    setting.remote.send(messages.encode_failed(0, verdict_to_proto(decided).SerializeToString()))
    assert await setting.remote.leave() == decided
    assert messages.parse_type(setting.said[-1]) is messages.MessageType.LEAVE and setting.hung_up == ["it has left"]
    with pytest.raises(FailedPreconditionError, match="rank 0 has left group 'world'"):
        await setting.submit(1)
    assert await setting.remote.leave() == decided, "said again it changes nothing"


@story
async def test_who_leaves_amid_a_collective_hangs_up_when_that_has_ended(setting: Setting) -> None:
    flight = await setting.submit(0)
    assert await setting.remote.leave() is None
    setting.remote.abandon(flight)
    assert setting.hung_up == []
    setting.done(0)
    assert setting.hung_up == ["it has left"]


@story
async def test_after_its_own_abort_a_rank_submits_nothing_more(setting: Setting) -> None:
    waiting = asyncio.ensure_future(setting.submit(1))
    await settle()
    await setting.remote.abort("loss is NaN")
    with pytest.raises(AbortedError, match="has aborted group 'world' itself: loss is NaN"):
        await setting.submit(0)
    setting.fail(0, verdict(Code.ABORTED, 0))
    with pytest.raises(AbortedError, match="decided"):
        await waiting
    assert setting.rung == []


@story
async def test_when_its_group_loop_lets_go_everything_ends(setting: Setting) -> None:
    flight = await setting.submit(0)
    waiting = asyncio.ensure_future(setting.submit(2))
    await settle()
    made = arena.create(1, 4096, readers_only=True)
    setting.remote.add_arena(made)
    assert len(setting.remote.get_arena(1)) == 4096
    setting.remote.end("its process ended")
    assert setting.hung_up == ["its process ended"]
    setting.remote.close()
    await settle()
    made.close()
    calls: list[Awaitable[Any]] = [
        flight.next_completion(),
        waiting,
        setting.submit(1),
        setting.remote.abort("too late"),
    ]
    for call in calls:
        with pytest.raises(UnavailableError, match="rank 0 of group 'world' has lost its place: its process ended"):
            await call
    with pytest.raises(UnavailableError):
        setting.remote.get_arena(1)
    assert await setting.remote.leave() is None and setting.budget.used == 0


@story
async def test_the_end_of_a_rank_is_the_end_of_what_waits_for_its_client(setting: Setting) -> None:
    async def receive() -> None:
        async with asyncio.timeout(None) as limit:
            with setting.remote.bind_timeout(limit):
                await asyncio.Event().wait()

    receiving = asyncio.ensure_future(receive())
    await settle()
    setting.remote.close()
    with pytest.raises(TimeoutError):
        await receiving


@story
async def test_a_rank_that_is_idle_gives_back_what_its_uploads_took(setting: Setting) -> None:
    uploads.SPARE_IDLE_SECONDS, before = 0.01, uploads.SPARE_IDLE_SECONDS
    try:
        await setting.submit(0)
        setting.done(0)
        assert setting.budget.used > 0, "kept for later"
        while setting.budget.used:
            await asyncio.sleep(0.001)
    finally:
        uploads.SPARE_IDLE_SECONDS = before


@story
async def test_a_receive_is_taken_back_when_its_turn_has_come_however_early_that_is_asked_for(setting: Setting) -> None:
    first, second = messages.P2P_BASE, messages.P2P_BASE + 1
    setting.remote.cancel((GENERATION, second))  # its stream has not come
    flight = await setting.submit(first, post=True)
    assert not cancels(setting)
    withdrawn = await setting.submit(second, post=True)
    setting.remote.cancel((GENERATION, first))
    assert cancels(setting) == [second, first]
    setting.remote.send(messages.Withdrawal(GENERATION, second, Code.CANCELLED).encode())
    setting.done(first)
    assert await withdrawn.next_completion() is None and withdrawn.withdrawn == Code.CANCELLED
    assert await flight.next_completion() is not None
    setting.remote.cancel((GENERATION, first))  # too late, which is no mistake
    assert cancels(setting) == [second, first]
    with pytest.raises(InvalidArgumentError, match="is no recv"):
        setting.remote.cancel((GENERATION, 3))


def cancels(setting: Setting) -> list[int]:
    kind = messages.MessageType.CANCEL
    return [messages.parse_withdrawal(one).instance for one in setting.said if messages.parse_type(one) is kind]
