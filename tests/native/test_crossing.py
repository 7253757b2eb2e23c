"""What a worker carries over again without Python: frames that leave, what becomes of those that come, what ends it."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.native.ranks import DIGEST, LIMIT_SECONDS, TINY, make_geometry, make_plan

from collectived_native import core, segment
from collectived_proto.types import DType
from collectived_runtime.transport import frame as frames

COUNT = 16
NBYTES = 4 * COUNT
KEY, GENERATION, PLAN = 3, 9, b"thisplan"
CONTRACT = b"contract"
CHAIN = b"12345678"
SUM = 1
START = 5
POLLED = struct.Struct("=ihh")
MINE, THEIRS = np.full(COUNT, 2.0, np.float32), np.full(COUNT, 40.0, np.float32)
TEMPLATE = frames.FrameTemplate(KEY, GENERATION, 0, 0, 0, PLAN, bytes(8))
ME, PEER = 0, 1


def make_route(rounds: int = 1) -> tuple[core.RouteMove, ...]:
    """One shot between two; once more for each further round, with the sums of the round before."""
    moves: list[core.RouteMove] = []
    for number in range(rounds):
        header, memory = TEMPLATE.header(number, 0, NBYTES), min(number, 1)
        moves.append((core.MOVE_SEND, number, PEER, memory, -1, False, 0, COUNT, header, ()))
        moves.append((core.MOVE_KEEP, number, PEER, 1, -1, False, 0, COUNT, header, ()))
        parts = (-1, len(moves) - 1)
        moves.append((core.MOVE_FOLD, number, 0, 1, memory, False, 0, COUNT, bytes(64), parts))
    moves.append((core.MOVE_FINISH, rounds, 0, 1, -1, False, 0, COUNT, bytes(64), ()))
    return tuple(moves)


class Host:
    """A worker with one rank, which sums on a thread of its own, and the far end of its link to another worker."""

    small = TINY.small

    def __init__(self, patience: float = LIMIT_SECONDS) -> None:
        self.geometry = replace(make_geometry(2, TINY), operated=1, start=START, small=self.small)
        self.descriptor = segment.create(self.geometry)
        self.knock = os.eventfd(0, os.EFD_NONBLOCK)
        self.stop = os.eventfd(0, os.EFD_NONBLOCK)  # somebody else's
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.far.settimeout(LIMIT_SECONDS)
        attached = segment.attach(self.descriptor, self.geometry, 1, knock=self.knock, waiting=segment.OPERATED)
        self.worker = attached
        self.watcher = segment.watch(self.descriptor, self.geometry)
        self.gathers, self.brings = self.make_plans(attached)
        self.crossings = core.crossings(attached, self.knock, int(patience * 1e9), TEMPLATE.header(0, 0, 0))
        self.chain = CHAIN
        self.results: list[float] = []
        self.told: list[bytes] = []
        self.thread: threading.Thread | None = None

    def make_plans(self, engine: core.Engine) -> tuple[core.Plan, core.Plan]:
        return self.make(engine, (), (COUNT,)), self.make(engine, (COUNT,), ())

    def make(self, engine: core.Engine, leaves_in: tuple[int, ...], leaves_out: tuple[int, ...]) -> core.Plan:
        phase = (int(DType.FLOAT32), (COUNT, COUNT, 0), leaves_in, leaves_out)
        return make_plan(engine, core.ACROSS, (phase,), reduce_op=SUM, root=1)

    def make_moved(self, engine: core.Engine, leaves_in: tuple[int, ...], leaves_out: tuple[int, ...]) -> core.Plan:
        """Of what another host's rank sends to this one's."""
        phase = (int(DType.FLOAT32), (0, COUNT, 0), leaves_in, leaves_out)
        return make_plan(engine, core.ACROSS, (phase,), root=1)

    def add(self, moves: tuple[core.RouteMove, ...], said: bytes = b"") -> None:
        terms = int(DType.FLOAT32), SUM, 2, COUNT, COUNT, COUNT, 2
        self.crossings.add(self.gathers, self.brings, CONTRACT, terms, moves, b"", b"", said)

    def sum(self, times: int, digest: bytes = DIGEST, said: bytes | None = None) -> None:
        """Have the rank sum so often."""

        def body() -> None:
            engine = segment.attach(self.descriptor, self.geometry, 0, knock=self.knock)
            phase = (int(DType.FLOAT32), (COUNT, COUNT, 0), (COUNT,), (COUNT,))
            plan = make_plan(engine, core.ACROSS, (phase,), reduce_op=SUM, root=1, digest=digest, description=7)
            out = np.zeros(COUNT, np.float32)
            for _ in range(times):
                job = engine.run(plan, (MINE,), (out,), 0, said)
                while job is not None and (state := job.wait(-1)) == core.KNOCK:
                    continue
                if job is not None and state != core.COMPLETE:
                    break
                self.results.append(float(out[0]))
            engine.detach()

        self.thread = threading.Thread(target=body)
        self.thread.start()

    def take_what_comes(self) -> None:
        """Have the rank take part in one of which it does not know what comes."""

        def body() -> None:
            engine = segment.attach(self.descriptor, self.geometry, 0, knock=self.knock)
            plan = make_plan(engine, core.ACROSS, (), root=1, is_open=True, digest=bytes(16), description=7)
            out = np.zeros(COUNT, np.float32)
            job = engine.run(plan, (), (), 0, None)
            while job is not None and (state := job.wait(-1)) in (core.KNOCK, core.DESCRIBE):
                if state == core.DESCRIBE:
                    self.told.append(job.blobs()[-1])
                    job.describe(self.make_moved(engine, (), (COUNT,)), (), (out,))
            self.results.append(float(out[0]))
            engine.detach()

        self.thread = threading.Thread(target=body)
        self.thread.start()

    def run(self, received: bytes = b"", seconds: float = LIMIT_SECONDS, number: int = START) -> tuple[object, ...]:
        watched = (self.knock, self.stop, self.near.fileno())
        polls = bytearray(b"".join(POLLED.pack(one, select.POLLIN, 0) for one in watched))
        wires = ((-1, b""), (self.near.fileno(), received))
        return self.crossings.run(number, self.chain, wires, polls, int(seconds * 1e9))

    def frame(self, number: int, round_: int = 0) -> bytes:
        """What the peer sends; to be asked in order."""
        if round_ == 0:
            self.chain = frames.next_chain(self.chain, CONTRACT)
        stamp = frames.FrameTemplate(KEY, GENERATION, number, 0, 0, PLAN, self.chain)
        return stamp.header(round_, 0, NBYTES) + THEIRS.tobytes()

    def hear(self) -> bytes:
        found = b""
        while len(found) < 64 + NBYTES:
            found += self.far.recv(64 + NBYTES - len(found))
        return found

    def close(self) -> None:
        self.watcher.abort(core.STOPPED, core.WORKER_SEAT)
        if self.thread is not None:
            self.thread.join(LIMIT_SECONDS)
            assert not self.thread.is_alive()
        self.near.close()
        self.far.close()
        self.worker.detach()
        self.watcher.close()
        for descriptor in (self.knock, self.stop, self.descriptor):
            os.close(descriptor)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


@pytest.mark.parametrize("length", [0, 1, 8, 16, 40, 64])
def test_the_chain_is_that_of_the_runtime(length: int) -> None:
    chain, contract = hashlib.sha256(b"1").digest()[:8], bytes(range(length))
    for _ in range(3):
        following = core.next_chain(chain, contract)
        assert following == frames.next_chain(chain, contract)
        chain = following


@pytest.mark.parametrize("rounds", [1, 3])
def test_any_number_of_instances_cross_in_one_call(host: Host, rounds: int) -> None:
    """None of their frames, and none of their wake-ups, returns to Python."""
    times, before = 300, host.chain
    host.add(make_route(rounds))
    host.sum(times)
    heard: list[bytes] = []

    def play_peer() -> None:
        for number in range(START, START + times):
            for round_ in range(rounds):
                theirs = host.frame(number, round_)
                host.far.sendall(theirs[: number % len(theirs)])  # in pieces
                heard.append(host.hear())
                host.far.sendall(theirs[number % len(theirs) :])
        assert host.thread is not None
        host.thread.join(LIMIT_SECONDS)
        os.eventfd_write(host.stop, 1)

    peer = threading.Thread(target=play_peer)
    began, host.chain = host.chain, before
    peer.start()
    watched = bytearray(b"".join(POLLED.pack(one, 1, 0) for one in (host.knock, host.stop, host.near.fileno())))
    told = host.crossings.run(START, began, ((-1, b""), (host.near.fileno(), b"")), watched, int(LIMIT_SECONDS * 1e9))
    peer.join(LIMIT_SECONDS)
    events, following, chain, is_odd, is_open, wires, totals, recent = told
    assert (events, following, chain) == ([(host.stop, select.POLLIN)], START + times, host.chain)
    assert not is_odd and not is_open
    assert host.results == [2.0 + 40.0 * rounds] * times
    nbytes = times * rounds * (64 + NBYTES)
    assert wires[PEER] == (0, b"", nbytes, nbytes)
    [(route, calls, nanoseconds, uneven, waited)] = totals
    assert (route, calls, uneven, waited) == (0, times, 0, (nanoseconds,))
    assert [one[0] for one in recent] == list(range(START, START + times))
    for _, _, started, ended, (arrived,), _, transfers in recent:
        assert arrived <= started <= ended and len(transfers) == 4 * rounds
        assert all(started <= at <= ended for at in transfers)
    assert {one[5] for one in recent} == {(7,)}
    first = frames.parse(heard[0][:64])
    assert (first.instance, first.chain, first.length) == (START, frames.next_chain(CHAIN, CONTRACT), NBYTES)
    assert heard[0][64:] == MINE.tobytes()


def expect_open(host: Host, told: tuple[object, ...], received: bytes) -> None:
    """Nothing is complete; what of the open instance was sent and received is told."""
    _, following, chain, _, is_open, wires, totals, recent = told
    assert (following, chain, is_open, totals, recent) == (START, CHAIN, True, [], [])
    assert wires[PEER] == (64 + NBYTES, received, 0, 0)  # type: ignore[index]
    assert host.watcher.decided() == (START, 0, 0)


def test_a_frame_that_differs_is_given_back_untouched(host: Host) -> None:
    host.add(make_route())
    host.sum(1)
    theirs = bytearray(host.frame(START))
    theirs[40] ^= 1  # another plan
    host.far.sendall(theirs)
    host.chain = CHAIN
    told = host.run()
    assert told[0] == [] and told[3]
    expect_open(host, told, bytes(theirs))
    assert host.results == []


def test_a_peer_that_is_late_is_left_to_those_who_watch_the_time() -> None:
    host = Host(patience=0.02)
    host.add(make_route())
    host.sum(1)
    theirs = host.frame(START)
    host.far.sendall(theirs[:70])
    host.chain = CHAIN
    told = host.run()
    assert told[0] == [] and told[3]
    expect_open(host, told, theirs[:70])
    host.close()


def test_an_event_of_somebody_else_ends_it_amid_a_frame(host: Host) -> None:
    host.add(make_route())
    host.sum(1)
    theirs = host.frame(START)
    host.chain = CHAIN
    os.eventfd_write(host.stop, 1)
    for _ in range(1000):  # until the rank has come
        told = host.run(theirs[:70])
        assert told[0] == [(host.stop, select.POLLIN)] and not told[3]
        if told[4]:
            break
        assert told[5][PEER] == (0, theirs[:70], 0, 0)  # type: ignore[index]
        time.sleep(0.01)
    expect_open(host, told, theirs[:70])


def test_a_frame_that_came_before_the_rank_waits_for_it(host: Host) -> None:
    host.add(make_route())
    theirs = host.frame(START)
    host.far.sendall(theirs)
    chain, host.chain = host.chain, CHAIN
    told = host.run(seconds=0.05)
    assert told[:5] == ([], START, CHAIN, False, False)
    assert told[5][PEER] == (0, theirs, 0, 0)  # type: ignore[index]
    host.sum(1)
    for _ in range(1000):
        told = host.run(theirs, seconds=0.05)
        if told[1] != START:
            break
    assert told[1:5] == (START + 1, chain, False, False)
    assert host.thread is not None
    host.thread.join(LIMIT_SECONDS)
    assert host.results == [42.0]


@pytest.mark.parametrize("what", ["later", "generation", "kind", "key"])
def test_a_frame_that_nobody_waits_for_is_for_others_to_judge(host: Host, what: str) -> None:
    host.add(make_route())
    changed: dict[str, Any] = {
        "later": {"instance": START + 1},
        "generation": {"generation": 1},
        "kind": {"kind": frames.FrameKind.BYE},
        "key": {"key": 1},
    }
    frame = frames.Frame(frames.FrameKind.DATA, 0, 0, 0, KEY, GENERATION, START, PLAN, bytes(8), 0, 0)
    frame = replace(frame, **changed[what])
    told = host.run(frame.encode())
    assert told[:5] == ([], START, CHAIN, True, False)
    assert told[5][PEER] == (0, frame.encode(), 0, 0)  # type: ignore[index]


def test_a_contract_without_a_route_is_left_alone(host: Host) -> None:
    host.add(make_route())
    host.sum(1, digest=b"another contract")
    told = host.run()
    assert told[:5] == ([], START, CHAIN, True, False) and told[5][PEER] == (0, b"", 0, 0)  # type: ignore[index]


def announce(number: int, chain: bytes, word: bytes) -> bytes:
    kind = frames.FrameKind.ANNOUNCEMENT
    return frames.Frame(kind, 0, 0, 0, KEY, GENERATION, number, PLAN, chain, 0, len(word)).encode() + word


def announced(word: bytes) -> tuple[core.RouteMove, ...]:
    """What is sent and has to come before the sums."""
    header = announce(0, bytes(8), word)[:64]
    before = tuple((kind, 0, PEER, 3, -1, 0, 0, len(word), header, ()) for kind in (core.MOVE_SEND, core.MOVE_RECEIVE))
    after: Any = [(kind, 1 + number, *rest) for kind, number, *rest in make_route()]
    after[2] = (*after[2][:-1], (-1, 3))
    return *before, *after


@pytest.mark.parametrize("word", [b"this", b"that"])
def test_what_is_told_before_the_values_has_to_be_as_before(host: Host, word: bytes) -> None:
    terms = int(DType.FLOAT32), SUM, 2, COUNT, COUNT, COUNT, 2
    host.crossings.add(host.gathers, host.brings, CONTRACT, terms, announced(b"this"), b"this", b"", b"")
    theirs = host.frame(START)
    chain, host.chain = host.chain, CHAIN
    told = host.run(announce(START, chain, word) + theirs, seconds=0.02)
    assert not told[3], "it is early, and nothing odd"
    host.sum(1)
    for _ in range(1000):
        told = host.run(announce(START, chain, word) + theirs, seconds=0.05)
        if told[1] != START or told[3]:
            break
    if word == b"that":
        assert told[1:5] == (START, CHAIN, True, True) and host.results == []
        assert told[5][PEER][:2] == (64 + 4, announce(START, chain, word) + theirs)  # type: ignore[index]
        return
    assert told[1:5] == (START + 1, chain, False, False)
    assert host.thread is not None
    host.thread.join(LIMIT_SECONDS)
    assert host.results == [42.0]


@pytest.mark.parametrize("announces_late", [False, True])
@pytest.mark.parametrize("word", [b"this", b"that", b"longer", b"none"])
def test_where_all_take_what_comes_the_announcement_says_which_route_it_is(
    host: Host, word: bytes, announces_late: bool
) -> None:
    """Routes differ by their contracts and words; the last word is of none of them."""
    terms = int(DType.FLOAT32), 0, 1, 0, COUNT, COUNT, 2
    plans = host.make_moved(host.worker, (), (0,)), host.make_moved(host.worker, (COUNT,), ())
    routes = {b"this": b"other contract", b"that": CONTRACT, b"longer": b"a third contract"}
    if word in routes:
        routes = {one: CONTRACT if one == word else b"other " + contract for one, contract in routes.items()}
    for one, contract in routes.items():
        header = announce(0, bytes(8), one)[:64]
        told_before = (core.MOVE_RECEIVE, 0, PEER, 3, -1, 0, 0, len(one), header, ())
        value = (core.MOVE_RECEIVE, 1, PEER, 2, -1, 0, 0, COUNT, TEMPLATE.header(0, 0, NBYTES), ())
        host.crossings.add(*plans, contract, terms, (told_before, value), one, one, b"")
    theirs = host.frame(START)
    chain, host.chain = host.chain, CHAIN
    whole = announce(START, chain, word) + theirs
    host.take_what_comes()
    knocks, links = bytearray(POLLED.pack(host.knock, select.POLLIN, 0)), ((-1, b""), (-1, b""))
    told: tuple[object, ...] = host.crossings.run(START, host.chain, links, knocks, int(LIMIT_SECONDS * 1e9))
    assert told[1:5] == (START, CHAIN, True, False), "it is dialled by the general executor"
    if announces_late:
        for part in (b"", whole[:30], whole[: 64 + 2]):
            told = host.run(part, seconds=0.05)
            assert told[1:5] == (START, CHAIN, False, False), "it is not known yet what comes"
    told = host.run(whole, seconds=0.0)
    for _ in range(1000):
        if told[1] != START or told[3]:
            break
        told = host.run(whole, seconds=0.05)
    if word == b"none":
        assert told[1:5] == (START, CHAIN, True, False)
        return
    assert told[1:5] == (START + 1, chain, False, False)
    assert host.thread is not None
    host.thread.join(LIMIT_SECONDS)
    assert host.results == [40.0] and host.told == [word]


@pytest.mark.parametrize(
    ("at", "value"),
    [(3, 3), (4, -1), (4, 3), (5, 1), (5, -1), (6, 1), (7, COUNT + 1), (3, 4)],
)
def test_copies_that_do_not_fit_are_refused(host: Host, at: int, value: int) -> None:
    copy: Any = [core.MOVE_COPY, 0, 0, 1, 0, 0, 0, COUNT, bytes(64), ()]
    host.add((*make_route(), tuple(copy)))
    copy[at] = value
    with pytest.raises(ValueError, match="does not fit"):
        host.add((*make_route(), tuple(copy)))


@pytest.mark.parametrize(
    "terms",
    [
        (int(DType.FLOAT32), SUM, 2, COUNT + 1, COUNT, COUNT, 2),  # not what the plan takes
        (int(DType.FLOAT64), SUM, 2, COUNT, COUNT, COUNT, 2),
        (int(DType.FLOAT32), SUM, 2, COUNT, COUNT, COUNT - 1, 2),
        (int(DType.FLOAT32), SUM, 2, COUNT, COUNT, COUNT, 3),
        (int(DType.FLOAT32), 99, 2, COUNT, COUNT, COUNT, 2),
        (int(DType.FLOAT32), SUM, 0, COUNT, COUNT, COUNT, 2),
    ],
)
def test_terms_that_do_not_fit_are_refused(host: Host, terms: tuple[int, int, int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="terms|arithmetic"):
        host.crossings.add(host.gathers, host.brings, CONTRACT, terms, (), b"", b"", b"")


@pytest.mark.parametrize("said", [None, b"16", b"17", b"160"])
def test_what_ranks_say_of_their_values_has_to_be_as_before(host: Host, said: bytes | None) -> None:
    host.add(make_route(), b"16")
    host.sum(1, said=said)
    theirs = host.frame(START)
    host.chain = CHAIN
    told = host.run(theirs, seconds=0.05)
    for _ in range(1000):
        if told[1] != START or told[3]:
            break
        told = host.run(theirs, seconds=0.05)
    assert told[1] == START + (said == b"16") and bool(told[3]) == (said != b"16")


def test_a_link_that_ends_is_told(host: Host) -> None:
    host.add(make_route())
    host.far.close()
    told = host.run()
    assert [descriptor for descriptor, _ in told[0]] == [host.near.fileno()]  # type: ignore[attr-defined]
    assert told[1:5] == (START, CHAIN, False, False)


def test_a_generation_that_is_over_is_told_at_once(host: Host) -> None:
    host.add(make_route())
    host.watcher.abort(core.ABORTED, 0)
    assert host.run()[:5] == ([], START, CHAIN, True, False)


def test_a_link_that_takes_no_more_is_waited_for(host: Host) -> None:
    host.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    filled = 0
    while True:
        try:
            filled += host.near.send(bytes(1 << 16))
        except BlockingIOError:
            break
    host.add(make_route())
    host.sum(1)
    theirs = host.frame(START)
    host.far.sendall(theirs)

    def drain() -> None:
        left = filled
        while left:
            left -= len(host.far.recv(left))
        host.hear()
        assert host.thread is not None
        host.thread.join(LIMIT_SECONDS)
        os.eventfd_write(host.stop, 1)

    chain, host.chain = host.chain, CHAIN
    peer = threading.Thread(target=drain)
    peer.start()
    told = host.run()
    peer.join(LIMIT_SECONDS)
    assert told[1:5] == (START + 1, chain, False, False)
    assert host.results == [42.0]


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 99), (2, 64), (3, 3), (4, 3), (6, COUNT), (7, COUNT + 1), (8, b"short"), (9, (5,)), (6, -1)],
)
def test_moves_that_do_not_fit_are_refused(host: Host, at: int, value: object) -> None:
    fold = list(make_route()[2])
    fold[at] = value
    with pytest.raises(ValueError, match="does not fit|no move keeps"):
        host.add((*make_route()[:2], tuple(fold)))  # type: ignore[arg-type]
    assert host.run(seconds=0.0)[1] == START


def test_an_engine_that_is_detached_carries_nothing(host: Host) -> None:
    host.worker.detach()
    with pytest.raises(RuntimeError):
        host.run()
