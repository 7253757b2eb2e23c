"""Links across generations: group loops over real connection servers, each generation a world of its own."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.certificates import Signer
from tests.runtime.engine.conftest import SLOT, World

from collectived_proto.errors import Code
from collectived_proto.ipc import messages
from collectived_proto.tls.files import TlsMaterial, client_context, load_material, server_context
from collectived_proto.types import Recv, Send, Tier
from collectived_runtime.engine.loop.group_loop import GroupLoop
from collectived_runtime.transport.connections import ConnectionServer
from collectived_runtime.transport.handshake import TlsContexts

WORKERS = 3
RING = (Tier("ring", shards=2),)


def contexts_of(material: TlsMaterial) -> TlsContexts:
    both = server_context(material, demand=True), client_context(material)
    return lambda: both


@pytest.fixture(params=["tcp", "tls"])
def connection_servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[ConnectionServer]]:
    contexts = (
        contexts_of(load_material(Signer(tmp_path / "authority").issue("host"))) if request.param == "tls" else None
    )
    made = [
        ConnectionServer(task, "of these tests", str(tmp_path / f"door-{task}"), ("127.0.0.1", 0), contexts=contexts)
        for task in range(WORKERS)
    ]
    yield made
    for connection_server in made:
        connection_server.close()


def opened(connection_servers: list[ConnectionServer], how: str) -> int:
    return sum(connection_server.links_opened[how] for connection_server in connection_servers)


def free(connection_servers: list[ConnectionServer]) -> int:
    """Connections that may be taken again."""
    return sum(len(connection_server._pool._reusable) for connection_server in connection_servers)


def is_plain(connection_servers: list[ConnectionServer]) -> bool:
    return connection_servers[0]._contexts is None


def settle(fact: Callable[[], bool]) -> None:
    while not fact():
        select.select([], [], [], 0.001)


def runs(group_loops: list[GroupLoop], instance: int) -> bool:
    running = [group_loop.execution for group_loop in group_loops]
    return all(one is not None and one.instance.number == instance for one in running)


def all_reduce(world: World) -> None:
    for rank in world.ranks:
        rank.submit(np.full(60, rank.rank + 1.0, np.float32))
    for rank in world.ranks:
        assert rank.result(rank.done(), count=60).tolist() == [6.0] * 60


def letter(world: World) -> None:
    sender, receiver = world.ranks[2], world.ranks[0]
    receiver.post(Recv(2))
    sender.post(Send(0), np.arange(4, dtype=np.float32))
    sender.done()
    assert receiver.outlined(receiver.done())[0].ravel().tolist() == [0, 1, 2, 3]


def leave(world: World) -> None:
    for rank in world.ranks:
        rank.doorbell.send(messages.encode_bare(messages.MessageType.LEAVE))
        rank.doorbell.close()
    for group_loop in world.group_loops:
        group_loop.join()


def test_twenty_generations_dial_once_for_each_pair_and_channel(
    world: Any, connection_servers: list[ConnectionServer]
) -> None:
    """Where connections may have been lent to ranks, which needs plain TCP, those are dialled each time."""
    links = 3 * 2 + 1  # each two of a ring of three in two shards, and the way of a letter
    lendable = 3 if is_plain(connection_servers) else 0
    for number in range(20):
        one = world(1, 1, 1, table=RING, generation=100 + number, connection_servers=connection_servers)
        all_reduce(one)
        letter(one)
        leave(one)
        settle(lambda: free(connection_servers) == links - lendable)
    assert opened(connection_servers, "dialled") == opened(connection_servers, "accepted") == links + 19 * lendable
    assert opened(connection_servers, "kept") == 2 * 19 * (links - lendable)


def test_another_group_of_the_same_workers_takes_them_too(
    world: Any, connection_servers: list[ConnectionServer]
) -> None:
    kept = 3 if is_plain(connection_servers) else 6
    for key in (7, 8):
        one = world(1, 1, 1, table=RING, key=key, connection_servers=connection_servers)
        all_reduce(one)
        leave(one)
        settle(lambda: free(connection_servers) == kept)
    assert opened(connection_servers, "dialled") == 6 + 6 - kept


def test_what_was_under_way_on_a_link_never_reaches_the_next_generation(
    world: Any, connection_servers: list[ConnectionServer]
) -> None:
    """Two of three submit, and a verdict comes amid it: frames of that instance lie where nobody reads them."""
    for number in range(5):
        one = world(1, 1, 1, table=RING, generation=100 + number, connection_servers=connection_servers)
        all_reduce(one)
        for rank in one.ranks[:2]:
            rank.submit(np.full(SLOT // 8, 13.0, np.float32))
        settle(partial(runs, one.group_loops[:2], 1))
        one.rule(one.verdict(Code.ABORTED, from_instance=1))
        assert [rank.failed()[0] for rank in one.ranks[:2]] == [1, 1]
        leave(one)


def test_a_loop_whose_peer_hung_up_amid_a_task_sleeps(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll tells of a hang-up again and again, whatever it is asked: a worker without a coordinator span for good."""
    one = world(1, 1, 1, table=(Tier("ring"),))
    all_reduce(one)
    turns = 0
    poller = one.group_loops[0]._poller
    wait = poller.wait

    def counted(*how: Any) -> None:
        nonlocal turns
        turns += 1
        wait(*how)

    monkeypatch.setattr(poller, "wait", counted)
    one.ranks[0].submit(np.ones(SLOT // 8, np.float32))
    settle(partial(runs, one.group_loops[:1], 1))
    one.ranks[1].doorbell.send(messages.encode_bare(messages.MessageType.LEAVE))
    one.ranks[1].doorbell.close()
    one.group_loops[1].join()
    before = turns
    select.select([], [], [], 0.3)
    assert turns - before < 30
    assert one.group_loops[0].execution is not None, "nobody has decided anything"
