"""Links of every state whose other end dies: whoever owns the descriptor handles or removes it, and the loop sleeps."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.certificates import Signer
from tests.runtime.transport.test_link_streams import Pair, tcp_pair, tls_pair

from collectived_proto.tls.files import TlsMaterial, load_material
from collectived_proto.types import GroupInfo, Member, Peer, Tier
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.run.links import Links, PeerNetwork
from collectived_runtime.limits.rejections import RejectionCounters
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.frame import HEADER_BYTES, FrameTemplate
from collectived_runtime.transport.link import Link, LinkBroken

KEY, GENERATION = 7, 100
WATCHED_SECONDS = 0.2
MOST_TURNS = 10
TLS_DIALLED, TLS_ACCEPTED = TLS = ("tls, dialled here", "tls, accepted here")
over_tls = pytest.mark.parametrize("scene", TLS, indirect=True)


class Nobody:
    """Gives no links; closes those that are given back."""

    def dial(self, call: Any) -> None: ...

    def expect_links(self, keys: Any, arrived: Any) -> None: ...

    def discard_generation(self, key: int, generation: int) -> None: ...

    def release_link(self, link: Link, farewell: bytes) -> None:
        link.close()


class Scene:
    """The links of one worker to another, of which one is there, and its other end."""

    def __init__(self, streams: Pair, path_timeout: float = math.inf) -> None:
        members = tuple(Member(rank, f"CPU:{rank}", rank, f"host{rank}", 1) for rank in range(2))
        peers = tuple(Peer(task, "i", f"host{task}", "127.0.0.1:1", (task,), 0) for task in range(2))
        topology = GroupTopology.from_peers(GroupInfo("g", KEY, GENERATION, members), peers, 0, (Tier("ring"),), False)
        self.poller = Poller()
        self.broken: list[LinkBroken] = []
        self.links = Links(
            PeerNetwork(topology, GENERATION, Nobody(), self.poller, RejectionCounters(), path_timeout),
            self.broken.append,
            lambda link, frame: None,
        )
        mine, self.other = streams
        self.link = Link(1, 0, mine)
        self.links.add(self.link)
        self.used: dict[Link, int] = {}

    def hear(self, data: bytes) -> None:
        """The other end says something, which is read as far as the state wants it."""
        assert self.other.send([data]) == len(data)
        select.select([self.link.stream], [], [], 10)

    def hear_raw(self, data: bytes) -> None:
        """The same below TLS."""
        with self.raw() as below:
            below.sendall(data)
        select.select([self.link.stream], [], [], 10)

    def raw(self) -> socket.socket:
        """The other end's socket, once more."""
        return socket.socket(fileno=os.dup(self.other.fileno()))

    def turn(self, seconds: float) -> None:
        self.links.update_watches(self.used)
        self.poller.wait(time.monotonic() + seconds)

    def count_turns(self) -> int:
        """How often the loop turns while nothing new happens; a task that holds a link learns nothing from it."""
        for _ in range(5):
            self.turn(0.02)
        turns, until = 0, time.monotonic() + WATCHED_SECONDS
        while time.monotonic() < until:
            self.turn(until - time.monotonic())
            turns += 1
        return turns

    def close(self) -> None:
        self.links.close()
        self.poller.close()
        self.other.close()


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> TlsMaterial:
    return load_material(Signer(tmp_path_factory.mktemp("certificates")).issue("host"))


@pytest.fixture(params=["tcp", TLS_DIALLED, TLS_ACCEPTED])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    dialled, accepted = tcp_pair() if request.param == "tcp" else tls_pair(request.getfixturevalue("material"))
    pair = (dialled, accepted) if request.param == TLS_DIALLED else (accepted, dialled)
    made = Scene(pair)
    yield made
    made.close()


BYE = frames.encode_bye(KEY, GENERATION)
RECORD_BYTES = 16 << 10
RECORD_HEADER = struct.pack(">BHH", 23, 0x0303, RECORD_BYTES)  # of data, which is to follow
LATER = FrameTemplate(KEY, GENERATION, 99, 0, 0, bytes(8), bytes(8)).header(0, 0, 64)


def idle(scene: Scene) -> None:
    scene.turn(0.0)


def idle_amid_a_header(scene: Scene) -> None:
    scene.hear(BYE[: HEADER_BYTES // 2])
    scene.turn(0.0)


def parked(scene: Scene) -> None:
    scene.hear(LATER)
    scene.turn(0.0)
    assert scene.link.has_header


def in_use(events: int) -> Callable[[Scene], None]:
    def use(scene: Scene) -> None:
        scene.used = {scene.link: events}
        scene.turn(0.0)

    return use


def in_use_and_parked(events: int, said: bytes) -> Callable[[Scene], None]:
    def use(scene: Scene) -> None:
        scene.used = {scene.link: events}
        scene.hear(said)
        assert scene.link.read_header() is not None
        scene.turn(0.0)

    return use


def abandoned(scene: Scene) -> None:
    scene.used = {scene.link: select.POLLIN}
    scene.turn(0.0)
    scene.links.abandon([scene.link])
    scene.used = {}


STATES = {
    "idle": idle,
    "idle amid a header": idle_amid_a_header,
    "parked": parked,
    "in use, not waited for": in_use(0),
    "in use, to receive": in_use(select.POLLIN),
    "in use, to send": in_use(select.POLLOUT),
    "in use, parked, not waited for": in_use_and_parked(0, LATER),
    "in use, parked, to receive": in_use_and_parked(select.POLLIN, LATER),
    "in use, parked by a farewell, not waited for": in_use_and_parked(0, BYE),
    "in use, parked by a farewell, to receive": in_use_and_parked(select.POLLIN, BYE),
    "abandoned": abandoned,
}


TOLD_ONCE = [state for state in STATES if state.startswith(("idle", "parked", "in use, not", "in use, parked,"))]


def close(scene: Scene) -> None:
    scene.other.close()


def reset(scene: Scene) -> None:
    with scene.raw() as below:
        below.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    scene.other.close()


def close_both_ways(scene: Scene) -> None:
    """What we said before makes the other end, which has closed, reset."""
    scene.other.close()
    with contextlib.suppress(LinkBroken):
        scene.link.send([b"x"])


@pytest.mark.parametrize("die", [close, reset, close_both_ways])
@pytest.mark.parametrize("state", STATES)
def test_a_link_that_dies_does_not_keep_the_loop_awake(scene: Scene, state: str, die: Callable[[Scene], None]) -> None:
    STATES[state](scene)
    die(scene)
    # A task looks at what it waits for: it finds the end, and parts from the link, as a group loop does then.
    if scene.used.get(scene.link) and not scene.link.has_header:
        scene.turn(0.5)
        assert scene.link in scene.links.ready
        scene.links.drop(scene.link)
        scene.used = {}
    assert scene.count_turns() <= MOST_TURNS


@pytest.mark.parametrize("die", [reset, close_both_ways])
@pytest.mark.parametrize("state", TOLD_ONCE)
def test_the_end_of_a_link_that_nobody_waits_for_is_told_once(
    scene: Scene, state: str, die: Callable[[Scene], None]
) -> None:
    STATES[state](scene)
    die(scene)
    scene.count_turns()
    assert [error.peer for error in scene.broken] == [1] and not list(scene.links)


def idle_amid_a_record(scene: Scene) -> None:
    scene.hear_raw(RECORD_HEADER)
    scene.turn(0.0)


def parked_amid_a_record(scene: Scene) -> None:
    parked(scene)
    scene.hear_raw(RECORD_HEADER)
    scene.turn(0.0)


def say_nonsense(scene: Scene) -> None:
    """What no TLS is, of a length that it might have; the connection goes on."""
    scene.hear_raw(RECORD_HEADER + bytes(RECORD_BYTES))


def say_goodbye(scene: Scene) -> None:
    """As TLS ends in order."""
    ends = scene.other._socket  # type: ignore[attr-defined]  # a TlsStream has no such farewell
    with contextlib.suppress(ssl.SSLWantReadError):
        ends.unwrap()
    select.select([scene.link.stream], [], [], 10)


@over_tls
@pytest.mark.parametrize("die", [close, reset, close_both_ways])
@pytest.mark.parametrize("state", [idle_amid_a_record, parked_amid_a_record])
def test_a_link_that_dies_amid_a_record_does_not_keep_the_loop_awake(
    scene: Scene, state: Callable[[Scene], None], die: Callable[[Scene], None]
) -> None:
    state(scene)
    die(scene)
    assert scene.count_turns() <= MOST_TURNS


@over_tls
@pytest.mark.parametrize("die", [say_nonsense, say_goodbye])
@pytest.mark.parametrize("state", STATES)
def test_what_ends_tls_alone_does_not_keep_the_loop_awake(
    scene: Scene, state: str, die: Callable[[Scene], None]
) -> None:
    test_a_link_that_dies_does_not_keep_the_loop_awake(scene, state, die)


@over_tls
@pytest.mark.parametrize("die", [say_nonsense, say_goodbye])
@pytest.mark.parametrize("state", [idle, idle_amid_a_header])
def test_what_ends_tls_alone_is_told_once(
    scene: Scene, state: Callable[[Scene], None], die: Callable[[Scene], None]
) -> None:
    state(scene)
    die(scene)
    scene.count_turns()
    assert [error.peer for error in scene.broken] == [1] and not list(scene.links)
