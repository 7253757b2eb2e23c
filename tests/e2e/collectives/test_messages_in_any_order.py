"""Random sends and recvs among three ranks: each recv gets what a reference says, whoever is early or late."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectived as cd

SIZE, MESSAGES = 3, 40


class Message(NamedTuple):
    source: int
    to: int
    tag: int
    value: Any


def make_value(chance: random.Random, number: int) -> Any:
    kind = chance.randrange(8)
    if kind == 0:
        return {"a": [np.full((2, 3), number, np.int16), None], "b": float(number)}
    if kind == 1:
        return [number, np.zeros((0, 4)), (np.float32(number), True)]
    if kind == 2:
        return {f"layer {index} of message {number}": np.full(index % 5, index) for index in range(200)}
    shape = chance.choice(((), (1,), (0,), (3,), (40, 30), (1 << 16,), (150_000,)))
    dtype = chance.choice((np.float32, np.int64, np.complex64, np.bool_, np.dtype(">f8")))
    return (np.arange(int(np.prod(shape))) + number).astype(dtype).reshape(shape)


def make_exchange(seed: int) -> list[Message]:
    chance = random.Random(seed)
    return [
        Message(chance.randrange(SIZE), chance.randrange(SIZE), chance.choice((0, 0, 1, 7)), make_value(chance, number))
        for number in range(MESSAGES)
    ]


def expect(exchange: list[Message]) -> dict[tuple[int, int, int], deque[Any]]:
    """By source, destination and tag: the values in the order in which they are to arrive."""
    boxes: dict[tuple[int, int, int], deque[Any]] = defaultdict(deque)
    for message in exchange:
        boxes[message.source, message.to, message.tag].append(message.value)
    return boxes


@pytest.mark.parametrize("transport", ["shared memory", "grpc"], indirect=True)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_recv_gets_the_next_value_of_its_source_and_tag(
    request: pytest.FixtureRequest, workers: int, transport: str, seed: int
) -> None:
    cluster: Any = request.getfixturevalue("one_worker") if workers == 1 else request.getfixturevalue("three_workers")
    exchange = make_exchange(seed)

    def body(group: cd.Group) -> list[tuple[Message, Any]]:
        chance = random.Random(f"{seed}.{group.rank}")
        sends = deque(message for message in exchange if message.source == group.rank)
        receives = [message for message in exchange if message.to == group.rank]
        chance.shuffle(receives)  # those of one source and tag come in their own order all the same
        early, late = receives[::2], receives[1::2]
        works, got = [], []
        while sends or early:
            if sends and (not early or chance.random() < 0.5):
                message = sends.popleft()
                sent = group.send(message.value, message.to, message.tag, async_op=chance.random() < 0.5)
                works += [] if sent is None else [sent]
            else:
                message = early.pop()
                got.append((message, group.recv(message.source, message.tag, async_op=True)))
            if chance.random() < 0.2:
                any(work.done() for _, work in got)
        for message in late:  # all that is to come has been sent, or will be
            got.append((message, group.recv(message.source, message.tag)))
        cd.wait(works)
        group.barrier()
        return [(message, one.result() if isinstance(one, cd.Work) else one) for message, one in got]

    boxes = expect(exchange)
    for rank, results in enumerate(cluster.run(SIZE, body)):
        for message, result in results:
            assert message.to == rank
            np.testing.assert_equal(result, boxes[message.source, rank, message.tag].popleft())
    assert not any(boxes.values())
