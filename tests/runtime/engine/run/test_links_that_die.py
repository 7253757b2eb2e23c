"""Links of every state whose other end dies: whoever owns the descriptor handles or removes it, and the loop sleeps."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collectived_proto.types import GroupInfo, Member, Peer, Tier
from collectived_runtime.engine.base.poller import Poller
from collectived_runtime.engine.base.topology import GroupTopology
from collectived_runtime.engine.run.links import Links, PeerNetwork
from collectived_runtime.limits.rejections import RejectionCounters
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.frame import HEADER_BYTES, FrameTemplate
from collectived_runtime.transport.link import Link, LinkBroken, TcpStream

KEY, GENERATION = 7, 100
WATCHED_SECONDS = 0.2
MOST_TURNS = 10


class Nobody:
    """Gives no links; closes those that are given back."""

    def dial(self, call: Any) -> None: ...

    def expect_link(self, key: Any, arrived: Any) -> None: ...

    def discard_generation(self, key: int, generation: int) -> None: ...

    def release_link(self, link: Link, farewell: bytes) -> None:
        link.close()


class Scene:
    """The links of one worker to another, of which one is there, and its other end."""

    def __init__(self) -> None:
        members = tuple(Member(rank, f"CPU:{rank}", rank, f"host{rank}", 1) for rank in range(2))
        peers = tuple(Peer(task, "i", f"host{task}", "127.0.0.1:1", (task,), 0) for task in range(2))
        topology = GroupTopology.from_peers(GroupInfo("g", KEY, GENERATION, members), peers, 0, (Tier("ring"),), False)
        self.poller = Poller()
        self.broken: list[LinkBroken] = []
        self.links = Links(
            PeerNetwork(topology, GENERATION, Nobody(), self.poller, RejectionCounters()),
            self.broken.append,
            lambda link, frame: None,
        )
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.other = socket.create_connection(listener.getsockname())
            mine, _ = listener.accept()
        self.link = Link(1, 0, TcpStream(mine))
        self.links.add(self.link)
        self.used: dict[Link, int] = {}

    def hear(self, data: bytes) -> None:
        """The other end says something, which is read as far as the state wants it."""
        self.other.sendall(data)
        select.select([self.link.stream.fileno()], [], [], 10)

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


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


BYE = frames.encode_bye(KEY, GENERATION)
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
    scene.other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
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
