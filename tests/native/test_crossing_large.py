"""Large values that cross as they are: frames land where they belong, and are given back where that is broken off."""

from __future__ import annotations

import array
import fcntl
import os
import select
import termios
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tests.native.ranks import LIMIT_SECONDS, make_plan
from tests.native.test_crossing import CHAIN, CONTRACT, GENERATION, KEY, PEER, PLAN, START, TEMPLATE, Host

from collectived_native import core, segment
from collectived_proto.types import DType
from collectived_runtime.transport import frame as frames

COUNT = 1 << 17  # of each of two ranks
NBYTES = 4 * COUNT


class Exchange(Host):
    """Its rank gives a value, and gets that and the one of another host's rank behind it."""

    small = 2 * NBYTES

    def make_plans(self, engine: core.Engine) -> tuple[core.Plan, core.Plan]:
        return self.make(engine, (), (COUNT,)), self.make(engine, (2 * COUNT,), ())

    def make(self, engine: core.Engine, leaves_in: tuple[int, ...], leaves_out: tuple[int, ...]) -> core.Plan:
        phase = (int(DType.FLOAT32), (COUNT, 2 * COUNT, 0), leaves_in, leaves_out)
        return make_plan(engine, core.ACROSS, (phase,), root=1)

    def add_route(self) -> None:
        header = TEMPLATE.header(0, 0, NBYTES)
        moves = (
            (core.MOVE_COPY, 0, 0, 2, 0, 0, 0, COUNT, bytes(64), ()),
            (core.MOVE_SEND, 0, PEER, 0, -1, 0, 0, COUNT, header, ()),
            (core.MOVE_RECEIVE, 0, PEER, 2, -1, 0, COUNT, COUNT, header, ()),
        )
        terms = int(DType.FLOAT32), 0, 1, COUNT, 0, 2 * COUNT, 2
        self.crossings.add(self.gathers, self.brings, CONTRACT, terms, moves, b"", b"", b"")

    def exchange(self, times: int) -> None:
        """Have the rank do so as often, with its number and that of the instance as values."""

        def body() -> None:
            engine = segment.attach(self.descriptor, self.geometry, 0, knock=self.knock)
            plan = self.make(engine, (COUNT,), (2 * COUNT,))
            out = np.zeros(2 * COUNT, np.float32)
            for number in range(times):
                job = engine.run(plan, (np.arange(COUNT, dtype=np.float32) + number,), (out,), 0, b"")
                while job is not None and (state := job.wait(-1)) == core.KNOCK:
                    continue
                if job is not None and state != core.COMPLETE:
                    break
                assert (out == np.concatenate([np.arange(COUNT) + number, theirs(number)])).all()
                self.results.append(float(out[-1]))
            engine.detach()

        self.thread = threading.Thread(target=body)
        self.thread.start()

    def large_frame(self, number: int) -> bytes:
        self.chain = frames.next_chain(self.chain, CONTRACT)
        stamp = frames.FrameTemplate(KEY, GENERATION, START + number, 0, 0, PLAN, self.chain)
        return stamp.header(0, 0, NBYTES) + theirs(number).tobytes()


def theirs(number: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.arange(COUNT, dtype=np.float32)[::-1] - 3 * number


@pytest.fixture
def host() -> Iterator[Exchange]:
    made = Exchange()
    made.add_route()
    yield made
    made.close()


def unread_bytes(host: Host) -> int:
    unread = array.array("i", [0])
    fcntl.ioctl(host.near, termios.FIONREAD, unread)
    return unread[0]


@pytest.mark.parametrize("piece", [1 << 10, 100_000, 1 << 30])
def test_frames_of_any_pieces_land_whole(host: Exchange, piece: int) -> None:
    times, heard = 12, []
    sent = b"".join(host.large_frame(number) for number in range(times))
    chain, host.chain = host.chain, CHAIN

    def play_peer() -> None:
        for at in range(0, len(sent), piece):
            host.far.sendall(sent[at : at + piece])

    def listen() -> None:
        for _ in range(times):
            frame = b""
            while len(frame) < 64 + NBYTES:
                frame += host.far.recv(64 + NBYTES - len(frame))
            heard.append(np.frombuffer(frame[64:], np.float32))
        assert host.thread is not None
        host.thread.join(LIMIT_SECONDS)
        os.eventfd_write(host.stop, 1)

    host.exchange(times)
    peers = [threading.Thread(target=play_peer), threading.Thread(target=listen)]
    for one in peers:
        one.start()
    told = host.run()
    for one in peers:
        one.join(LIMIT_SECONDS)
    assert told[:5] == ([(host.stop, select.POLLIN)], START + times, chain, False, False)
    assert host.results == [float(theirs(number)[-1]) for number in range(times)]
    assert [float(value[0]) for value in heard] == list(range(times))
    nbytes = times * (64 + NBYTES)
    assert told[5][PEER] == (0, b"", nbytes, nbytes)  # type: ignore[index]


@pytest.mark.parametrize("came", [64, 70, 70_000, NBYTES])
def test_what_has_landed_is_given_back_where_it_is_broken_off(host: Exchange, came: int) -> None:
    frame = host.large_frame(0)
    host.chain = CHAIN

    def break_off() -> None:
        host.far.sendall(frame[:came])
        end = time.monotonic() + LIMIT_SECONDS
        left = 64 + NBYTES  # of what the rank sends: then its instance is open
        while left and time.monotonic() < end:
            left -= len(host.far.recv(left))
        while unread_bytes(host) and time.monotonic() < end:
            time.sleep(0.001)
        os.eventfd_write(host.stop, 1)

    breaks = threading.Thread(target=break_off)
    host.exchange(1)
    breaks.start()
    told = host.run()
    breaks.join(LIMIT_SECONDS)
    assert told[:5] == ([(host.stop, select.POLLIN)], START, CHAIN, False, True)
    assert told[5][PEER] == (64 + NBYTES, frame[:came], 0, 0)  # type: ignore[index]
    assert host.results == []


def test_a_frame_that_moves_slowly_is_not_late() -> None:
    host = Exchange(patience=1.0)
    host.add_route()
    frame, pieces = host.large_frame(0), 8
    host.chain = CHAIN

    def play_peer() -> None:
        step = -(-len(frame) // pieces)
        for at in range(0, len(frame), step):
            select.select([], [], [], 0.2)
            host.far.sendall(frame[at : at + step])

    def listen() -> None:
        left = 64 + NBYTES
        while left:
            left -= len(host.far.recv(left))

    host.exchange(1)
    peers = [threading.Thread(target=play_peer), threading.Thread(target=listen)]
    for one in peers:
        one.start()
    told = host.run(seconds=LIMIT_SECONDS / 10)
    for one in peers:
        one.join(LIMIT_SECONDS)
    host.close()
    assert told[3] == core.LATE or (told[1], told[3]) == (START + 1, False), (
        "a busy machine may stand still for so long"
    )
    assert told[3] == core.LATE or host.results == [float(theirs(0)[-1])]
