"""Sends and receives: whatever the size, in order, and a send never waits for its receive."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from tests.matching_rules import MatchingRules
from tests.native.ranks import TINY, Failed, as_threads, finish, make_geometry, make_plan
from tests.waiting import settle

from collectived_native import core, segment
from collectived_proto.types import ANY_SOURCE

RING = 256 << 10
SIZES = (0, 1, 8, 3000, 4088, 4096, 5000, RING - 1, RING, RING + 1, 3 * RING + 5)
ROOMY = replace(make_geometry(2), mail=64 << 20)


def make_bytes(size: int, number: int = 0) -> np.ndarray:
    return np.random.default_rng(size + 7 * number).integers(0, 256, size, np.uint8)


def send(engine: core.Engine, to: int, value: np.ndarray, tag: int = 0) -> None:
    finish(engine, engine.send(to, tag, (value,), 0, b"%d" % len(value), core.BLOCKING))


def describe(job: core.Job) -> np.ndarray:
    out = np.zeros(int(job.blobs()[0]), np.uint8)
    job.describe(None, (), (out,))
    return out


def receive(engine: core.Engine, source: int, tag: int = 0) -> tuple[np.ndarray, int]:
    """Receives what comes; from whom."""
    job = engine.receive(source, tag, None, 0, None, core.BLOCKING)
    out = np.zeros(0, np.uint8)
    assert job is not None
    while (state := job.wait(-1)) != core.COMPLETE:
        if state == core.DESCRIBE:
            out = describe(job)
        elif state != core.KNOCK:
            raise Failed(state, engine.verdict())
    return out, job.source()


def expect(engine: core.Engine, source: int, size: int, tag: int = 0) -> np.ndarray:
    """Receives what is known beforehand."""
    out = np.zeros(size, np.uint8)
    finish(engine, engine.receive(source, tag, (out,), 0, b"%d" % size, core.BLOCKING))
    return out


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_a_letter_arrives_as_it_was_sent(size: int, knows: bool) -> None:
    def body(engine: core.Engine, rank: int) -> list[bool]:
        found = []
        for number in range(6):
            value = make_bytes(size, number)
            if rank == number % 2:
                send(engine, 1 - rank, value)
            else:
                out = expect(engine, 1 - rank, size) if knows else receive(engine, 1 - rank)[0]
                found.append(out.tobytes() == value.tobytes())
        return found

    assert as_threads(2, body) == [[True] * 3] * 2


def test_a_receiver_that_looks_for_long_sees_each_part_of_a_long_letter() -> None:
    looks = segment.Waiting(300_000_000, 0, False)  # nanoseconds; who is not told looks for all of them
    size, rounds = 2 * RING, 8

    def body(engine: core.Engine, rank: int) -> float:
        began = time.monotonic()
        for number in range(rounds):
            for sender in (0, 1):
                if rank == sender:
                    send(engine, 1 - rank, make_bytes(size, number))
                else:
                    expect(engine, 1 - rank, size)
        return time.monotonic() - began

    assert max(as_threads(2, body, geometry=ROOMY, waiting=looks)) < rounds * 0.3


def test_a_receive_that_another_thread_has_described_meanwhile_is_collected_when_it_is_complete() -> None:
    def body(engine: core.Engine, rank: int) -> list[int]:
        if rank == 0:
            send(engine, 1, make_bytes(100))
            return []
        job = engine.receive(0, 0, None, 0, None, core.NOTIFYING)
        assert job is not None
        settle(lambda: engine.advance(1 << 20) is not None and job.state() == core.DESCRIBE)
        describe(job)  # it is listed to be collected, and goes on
        states = [job.state() for one in engine.collect(0)]
        settle(lambda: engine.advance(1 << 20) is not None and job.state() == core.COMPLETE)
        return states + [one.state() for one in engine.collect(0)]

    nothing, told = as_threads(2, body)
    # It may be quick: complete before it is collected, or after that and before its state is asked for.
    assert nothing == [] and told[-1] == core.COMPLETE
    assert told[:-1] in ([core.PENDING], [core.COMPLETE], [])


def test_a_receive_that_ends_while_it_is_collected_stays_in_memory_until_it_is_collected_again() -> None:
    """Else this process ends with a double free, in one of some ten thousand rounds."""
    rounds = 8000

    def body(engine: core.Engine, rank: int) -> None:
        for _ in range(rounds):
            if rank == 0:
                send(engine, 1, make_bytes(100))
                continue
            job = engine.receive(0, 0, None, 0, None, core.NOTIFYING)
            assert job is not None
            while job.state() == core.PENDING:
                pass
            describe(job)
            del job
            for _ in range(8):
                engine.collect(0)

    as_threads(2, body)


@pytest.mark.parametrize("size", [10, 5000, 3 * RING])
def test_both_may_send_first(size: int) -> None:
    def body(engine: core.Engine, rank: int) -> bool:
        for number in range(10):
            send(engine, 1 - rank, make_bytes(size, number))
        return all(receive(engine, 1 - rank)[0].tobytes() == make_bytes(size, number).tobytes() for number in range(10))

    assert as_threads(2, body, geometry=ROOMY) == [True, True]


def test_a_letter_that_is_waited_for_may_be_larger_than_the_mail() -> None:
    geometry = replace(make_geometry(2), mail=RING)
    size = 20 * RING + 3

    def body(engine: core.Engine, rank: int) -> bool:
        if rank == 1:
            return expect(engine, 0, size).tobytes() == make_bytes(size).tobytes()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                send(engine, 1, make_bytes(size))
                return True
            except Failed as failure:  # the other has not posted its receive yet
                assert failure.reason == core.NO_ROOM
        return False

    assert as_threads(2, body, geometry=geometry) == [True, True]


def test_a_send_for_which_there_is_no_room_is_refused_and_the_next_goes() -> None:
    geometry = replace(make_geometry(2), mail=2 * RING)

    def body(engine: core.Engine, rank: int) -> int:
        if rank == 1:
            settle(lambda: gate.is_set())
            return sum(len(receive(engine, 0)[0]) for _ in range(3)) + len(receive(engine, 0, tag=1)[0])
        send(engine, 1, make_bytes(RING))
        send(engine, 1, make_bytes(RING))
        with pytest.raises(Failed) as caught:
            send(engine, 1, make_bytes(RING))
        assert caught.value.reason == core.NO_ROOM
        send(engine, 1, make_bytes(10))
        gate.set()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                send(engine, 1, make_bytes(RING), tag=1)
                break
            except Failed:
                continue
        return 3 * RING + 10

    gate = threading.Event()
    assert as_threads(2, body, geometry=geometry) == [3 * RING + 10] * 2


def test_letters_with_a_tag_arrive_in_order_and_tags_do_not_mix() -> None:
    chance = random.Random(3)
    tags = [chance.randrange(3) for _ in range(60)]

    def body(engine: core.Engine, rank: int) -> bool:
        if rank == 0:
            for number, tag in enumerate(tags):
                send(engine, 1, make_bytes(20, number), tag)
            return True
        wanted = {tag: [number for number, one in enumerate(tags) if one == tag] for tag in (2, 0, 1)}
        return all(
            receive(engine, 0, tag)[0].tobytes() == make_bytes(20, number).tobytes()
            for tag, numbers in wanted.items()
            for number in numbers
        )

    assert as_threads(2, body) == [True, True]


def test_more_letters_than_a_sender_has_room_for_wait_until_some_are_read() -> None:
    def body(engine: core.Engine, rank: int) -> bool:
        if rank == 0:
            for number in range(200):
                send(engine, 1, make_bytes(20, number))
            return True
        return all(receive(engine, 0)[0].tobytes() == make_bytes(20, number).tobytes() for number in range(200))

    assert as_threads(2, body) == [True, True]


def test_a_receive_from_anybody_is_fair_and_says_who_sent() -> None:
    seats, each = 4, 20

    def body(engine: core.Engine, rank: int) -> list[int]:
        if rank == 0:
            finish(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))
            return [receive(engine, -1)[1] for _ in range(each * (seats - 1))]
        for number in range(each):
            send(engine, 0, make_bytes(5, number))
        finish(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))
        return []

    found = as_threads(seats, body)[0]
    assert sorted(found) == sorted(list(range(1, seats)) * each)
    assert set(found[: seats - 1]) == set(range(1, seats))


def test_posted_receives_are_matched_in_order_beside_a_collective() -> None:
    def body(engine: core.Engine, rank: int) -> bool:
        if rank == 1:
            finish(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))
            for number in range(8):
                send(engine, 0, make_bytes(1000 + number, number))
            return True
        outs = [np.zeros(1000 + number, np.uint8) for number in range(8)]
        jobs = [engine.receive(1, 0, (out,), 0, b"%d" % len(out), core.QUIET) for number, out in enumerate(outs)]
        finish(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))  # a receive does not hold it back
        for job in reversed(jobs):
            finish(engine, job)
        return all(out.tobytes() == make_bytes(1000 + number, number).tobytes() for number, out in enumerate(outs))

    assert as_threads(2, body) == [True, True]


def test_letters_that_come_while_receives_are_looked_through_go_to_those_posted_first() -> None:
    count = 300

    def body(engine: core.Engine, rank: int) -> bool:
        if rank == 1:
            for number in range(count):
                send(engine, 0, make_bytes(20, number), number % 3)
            return True
        outs = [np.zeros(20, np.uint8) for _ in range(count)]
        jobs = [engine.receive(1, number % 3, (out,), 0, b"20", core.QUIET) for number, out in enumerate(outs)]
        for job in jobs:
            finish(engine, job)
        return [out.tobytes() for out in outs] == [make_bytes(20, number).tobytes() for number in range(count)]

    assert as_threads(2, body) == [True, True]


def test_thousands_of_receives_wait_for_letters_that_come_in_any_order() -> None:
    count = 3000
    order = random.Random(5).sample(range(count), count)

    def body(engine: core.Engine, rank: int) -> bool:
        if rank == 1:
            for tag in order:
                send(engine, 0, make_bytes(20, tag), tag)
            return True
        outs = [np.zeros(20, np.uint8) for _ in range(count)]
        jobs = [
            engine.receive(-1 if tag % 7 == 0 else 1, tag, (out,), 0, b"20", core.QUIET) for tag, out in enumerate(outs)
        ]
        cancelled = engine.receive(1, count, None, 0, None, core.QUIET)
        assert cancelled is not None
        for tag in order:
            finish(engine, jobs[tag])
        cancelled.cancel()
        settle(lambda: cancelled.state() == core.CANCELLED)
        return [out.tobytes() for out in outs] == [make_bytes(20, tag).tobytes() for tag in range(count)]

    assert as_threads(2, body) == [True, True]


def test_more_letters_than_fit_are_refused_after_a_while_and_none_is_lost() -> None:
    def body(engine: core.Engine, rank: int) -> int:
        if rank == 0:
            for _ in range(core.MAX_LETTERS):
                send(engine, 1, make_bytes(3))
            with pytest.raises(Failed) as caught:
                send(engine, 1, make_bytes(3))
            assert caught.value.reason == core.NO_ROOM
            gate.set()
            return core.MAX_LETTERS
        settle(lambda: gate.is_set())
        return sum(len(receive(engine, 0)[0]) == 3 for _ in range(core.MAX_LETTERS))

    gate = threading.Event()
    assert as_threads(2, body) == [core.MAX_LETTERS] * 2


def test_who_leaves_ends_only_what_goes_to_and_fro_with_it() -> None:
    def body(engine: core.Engine, rank: int) -> bool:
        if rank == 2:
            engine.leave()
            return True
        settle(lambda: engine.verdict()[1] == core.LEFT)
        send(engine, 1 - rank, make_bytes(30, rank))
        found = receive(engine, 1 - rank)[0].tobytes() == make_bytes(30, 1 - rank).tobytes()
        for lost in (lambda: send(engine, 2, make_bytes(3)), lambda: receive(engine, 2)):
            with pytest.raises(Failed) as caught:
                lost()
            assert caught.value.reason == core.LEFT
        return found

    assert as_threads(3, body) == [True] * 3


def test_what_is_abandoned_ends_wherever_it_waits() -> None:
    def body(engine: core.Engine, rank: int) -> bool:
        if rank == 1:
            size = 4 * RING
            job = engine.send(0, 0, (make_bytes(size),), 0, b"%d" % size, core.QUIET)
            assert job is not None
            settle(lambda: gate.is_set())
            job.abandon()
            settle(lambda: job.state() == core.CANCELLED)
            return True
        matched, waiting = (engine.receive(1, tag, None, 0, None, core.QUIET) for tag in (0, 5))
        assert matched is not None and waiting is not None
        settle(lambda: matched.state() == core.DESCRIBE)  # its sender waits for it from here on
        waiting.abandon()
        settle(lambda: waiting.state() == core.CANCELLED)
        gate.set()
        return True

    gate = threading.Event()
    assert as_threads(2, body, geometry=replace(make_geometry(2), mail=RING)) == [True, True]


@pytest.mark.parametrize("rest", [1, 3 * RING + 5])
def test_a_send_does_not_wait_for_a_receiver_that_reads_no_further(rest: int) -> None:
    size = 2 * RING + rest

    def body(engine: core.Engine, rank: int) -> bool:
        if rank == 1:
            for number in range(3):
                send(engine, 0, make_bytes(size, number))
            gate.set()
            return True
        first = engine.receive(1, 0, None, 0, None, core.QUIET)
        assert first is not None
        settle(lambda: first.state() == core.DESCRIBE)  # matched, and nothing is read
        settle(lambda: gate.is_set())
        out = describe(first)
        finish(engine, first)
        found = [out, *(receive(engine, 1)[0] for _ in range(2))]
        return [one.tobytes() for one in found] == [make_bytes(size, number).tobytes() for number in range(3)]

    gate = threading.Event()
    assert as_threads(2, body, geometry=ROOMY) == [True, True]


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_receive_that_is_given_up_ends_alone(how: str) -> None:
    def body(engine: core.Engine, rank: int) -> bool:
        if rank == 0:
            job = engine.receive(1, 0, None, 50_000_000 if how == "timeout" else 0, None, core.QUIET)
            assert job is not None
            if how == "cancel":
                job.cancel()
            wanted = core.CANCELLED if how == "cancel" else core.EXPIRED
            settle(lambda: job.state() == wanted)
        finish(engine, engine.run(make_plan(engine, core.BARRIER), (), (), 0, None))
        if rank == 1:
            send(engine, 0, make_bytes(30))
            return True
        return receive(engine, 1)[0].tobytes() == make_bytes(30).tobytes()

    assert as_threads(2, body) == [True, True]


def test_a_receive_that_is_matched_cannot_be_cancelled() -> None:
    def body(engine: core.Engine, rank: int) -> bool:
        if rank == 1:
            send(engine, 0, make_bytes(30))
            return True
        job = engine.receive(1, 0, None, 0, None, core.QUIET)
        assert job is not None
        settle(lambda: job.state() == core.DESCRIBE)
        job.cancel()
        out = describe(job)
        finish(engine, job)
        return out.tobytes() == make_bytes(30).tobytes()

    assert as_threads(2, body) == [True, True]


def test_what_was_sent_before_its_sender_left_arrives_and_nothing_more() -> None:
    def body(engine: core.Engine, rank: int) -> int:
        if rank == 1:
            send(engine, 0, make_bytes(RING + 9))
            engine.leave()
            return core.LEFT
        assert receive(engine, 1)[0].tobytes() == make_bytes(RING + 9).tobytes()
        with pytest.raises(Failed) as caught:
            receive(engine, 1)
        return caught.value.reason

    assert as_threads(2, body, geometry=ROOMY) == [core.LEFT] * 2


def test_an_abort_ends_receives() -> None:
    def body(engine: core.Engine, rank: int) -> int:
        if rank == 1:
            settle(lambda: posted.is_set())
            engine.abort(core.ABORTED, 1)
            return core.ABORTED
        job = engine.receive(1, 0, None, 0, None, core.QUIET)
        posted.set()
        assert job is not None
        settle(lambda: job.state() != core.PENDING)
        return job.state()

    posted = threading.Event()
    assert as_threads(2, body) == [core.ABORTED] * 2


def test_a_rank_may_send_to_itself() -> None:
    geometry = make_geometry(1, TINY)
    descriptor = segment.create(geometry)
    engine = segment.attach(descriptor, geometry, 0)
    send(engine, 0, make_bytes(100))
    assert receive(engine, 0)[0].tobytes() == make_bytes(100).tobytes()
    engine.detach()
    os.close(descriptor)


def test_a_ring_of_ranks_passes_large_letters_all_at_once() -> None:
    seats, size = 4, 2 * RING + 77

    def body(engine: core.Engine, rank: int) -> bool:
        found = []
        for number in range(5):
            out = np.zeros(size, np.uint8)
            before = (rank - 1) % seats
            receiving = engine.receive(before, 0, (out,), 0, b"%d" % size, core.QUIET)
            sending = engine.send(
                (rank + 1) % seats, 0, (make_bytes(size, 10 * rank + number),), 0, b"%d" % size, core.QUIET
            )
            finish(engine, sending)
            finish(engine, receiving)
            found.append(out.tobytes() == make_bytes(size, 10 * before + number).tobytes())
        return all(found)

    assert as_threads(seats, body, geometry=replace(ROOMY, seats=seats)) == [True] * seats


@pytest.mark.parametrize("seed", range(6))
def test_receives_take_what_the_rules_say_in_any_order_of_events(seed: int) -> None:
    """Events one after the other: letters of two senders, receives from one or any, and cancels."""

    def body(engine: core.Engine, rank: int) -> bool:
        engines[rank] = engine
        meet.wait(20)
        if rank == 0:
            play(engines, random.Random(seed))
        meet.wait(50)
        return True

    engines: dict[int, core.Engine] = {}
    meet = threading.Barrier(3)
    assert as_threads(3, body) == [True] * 3


def play(engines: dict[int, core.Engine], chance: random.Random) -> None:
    rules = MatchingRules()
    posted: dict[int, tuple[core.Job, np.ndarray]] = {}
    for number in range(120):
        tag, what = chance.randrange(2), chance.random()
        if what < 0.45:
            sender = chance.choice((1, 2))
            value = np.array([sender, number], np.int64)
            finish(engines[sender], engines[sender].send(0, tag, (value,), 0, b"pair", core.BLOCKING))
            taker = rules.deliver(number, sender, tag)
            if taker is not None:
                taken(posted.pop(taker), sender, number)
        elif what < 0.9:
            source, out = chance.choice((1, 2, ANY_SOURCE)), np.zeros(2, np.int64)
            job = engines[0].receive(-1 if source == ANY_SOURCE else source, tag, (out,), 0, b"pair", core.QUIET)
            assert job is not None
            waits = {sender for _, sender, other in rules.messages if other == tag and source in (sender, ANY_SOURCE)}
            if not waits:
                assert rules.post(number, source, tag) is None and job.source() == -1
                posted[number] = job, out
                continue
            settle(partial(is_over, job, core.COMPLETE))
            assert job.source() in waits  # of several the core takes one after the other, which is fair
            taken((job, out), *(rules.post(number, job.source(), tag) or (-1, -1)))
        elif posted:
            victim = chance.choice(list(posted))
            assert rules.withdraw(victim)
            job, _ = posted.pop(victim)
            job.cancel()
            settle(partial(is_over, job, core.CANCELLED))


def taken(receive: tuple[core.Job, np.ndarray], sender: int, number: int) -> None:
    """That receive has taken this message."""
    job, out = receive
    settle(partial(is_over, job, core.COMPLETE))
    assert (job.source(), out.tolist()) == (sender, [sender, number])


def is_over(job: core.Job, state: int) -> bool:
    return job.state() == state
