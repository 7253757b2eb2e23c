"""Links across generations: lanes over real receptions, each generation a world of its own."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.certificates import Signer

from collectived_proto.errors import Code
from collectived_proto.local import wire
from collectived_proto.tls.files import Material, client_context, load, server_context
from collectived_proto.types import Recv, Send, Tier
from collectived_runtime.engine.lane import Lane
from collectived_runtime.transport.handshake import Contexts
from collectived_runtime.transport.reception import Reception

from .conftest import SLOT, World

WORKERS = 3
RING = (Tier("ring", shards=2),)


def contexts_of(material: Material) -> Contexts:
    both = server_context(material, demand=True), client_context(material)
    return lambda: both


@pytest.fixture(params=["tcp", "tls"])
def receptions(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Reception]]:
    contexts = contexts_of(load(Signer(tmp_path / "authority").issue("host"))) if request.param == "tls" else None
    made = [
        Reception(task, "of these tests", str(tmp_path / f"door-{task}"), ("127.0.0.1", 0), contexts=contexts)
        for task in range(WORKERS)
    ]
    yield made
    for reception in made:
        reception.close()


def opened(receptions: list[Reception], how: str) -> int:
    return sum(reception.opened[how] for reception in receptions)


def free(receptions: list[Reception]) -> int:
    """Connections that may be taken again."""
    return sum(len(reception._kept._free) for reception in receptions)


def settle(fact: Callable[[], bool]) -> None:
    while not fact():
        select.select([], [], [], 0.001)


def runs(lanes: list[Lane], instance: int) -> bool:
    running = [lane.running for lane in lanes]
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
        rank.bell.send(wire.bare(wire.Kind.LEAVE))
        rank.bell.close()
    for lane in world.lanes:
        lane.join()


def test_twenty_generations_dial_once_for_each_pair_and_channel(world: Any, receptions: list[Reception]) -> None:
    links = 3 * 2 + 1  # each two of a ring of three in two shards, and the way of a letter
    for number in range(20):
        one = world(1, 1, 1, table=RING, generation=100 + number, receptions=receptions)
        all_reduce(one)
        letter(one)
        leave(one)
        settle(lambda: free(receptions) == links)
    assert opened(receptions, "dialled") == opened(receptions, "accepted") == links
    assert opened(receptions, "kept") == 2 * 19 * links


def test_another_group_of_the_same_workers_takes_them_too(world: Any, receptions: list[Reception]) -> None:
    for key in (7, 8):
        one = world(1, 1, 1, table=RING, key=key, receptions=receptions)
        all_reduce(one)
        leave(one)
        settle(lambda: free(receptions) == 6)
    assert opened(receptions, "dialled") == 6


def test_what_was_under_way_on_a_link_never_reaches_the_next_generation(
    world: Any, receptions: list[Reception]
) -> None:
    """Two of three submit, and a verdict comes amid it: frames of that instance lie where nobody reads them."""
    for number in range(5):
        one = world(1, 1, 1, table=RING, generation=100 + number, receptions=receptions)
        all_reduce(one)
        for rank in one.ranks[:2]:
            rank.submit(np.full(SLOT // 8, 13.0, np.float32))
        settle(partial(runs, one.lanes[:2], 1))
        one.rule(one.verdict(Code.ABORTED, from_instance=1))
        assert [rank.failed()[0] for rank in one.ranks[:2]] == [1, 1]
        leave(one)
