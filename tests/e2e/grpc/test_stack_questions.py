"""Clients over gRPC alone are asked what they do where others wait for them; what they say hurts nobody."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import pytest
from tests.e2e.raw_client import SUM, Raw, data, described, each, failure

from collectived_proto.ipc.messages import MAX_STACK

_names = itertools.count()


@pytest.fixture
def pair(one_worker: Any) -> Iterator[Callable[..., tuple[Raw, Raw]]]:
    """Two clients in a group of their own; `stacks`: the second one offers to be asked."""
    made: list[Raw] = []

    def make(stacks: bool = False) -> tuple[Raw, Raw]:
        name = f"stacks-{next(_names)}"
        clients = Raw(one_worker.addresses[0]), Raw(one_worker.addresses[0], stacks=stacks)
        made.extend(clients)
        each(lambda rank: clients[rank].join(name, 2, rank), range(2))
        return clients

    yield make
    for client in made:
        client.close()


def wait_for_the_other(client: Raw) -> tuple[str, str]:
    """What is said of the second rank when the deadline passes: in the text, and by itself."""
    code, text, verdict = failure(lambda: client.submit(described(SUM, (1,)), data([1]), timeout_seconds=2.0))
    assert code == "DEADLINE_EXCEEDED" and verdict is not None
    (missing,) = verdict.missing
    return text, missing.stack


@contextmanager
def answering(client: Raw, text: str) -> Iterator[None]:
    """Each question to this client is answered so."""

    def answer() -> None:
        with suppress(grpc.RpcError):  # the end of its session
            for event in client.life:
                assert event.HasField("stack_asked")
                client.tell_stack(text)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        client.life.cancel()
        thread.join(30)


def test_a_client_that_offers_it_is_asked_and_quoted(pair: Any) -> None:
    first, second = pair(stacks=True)
    with answering(second, "main.rs:12 in load\nthread io: epoll"):
        text, stack = wait_for_the_other(first)
    assert "; now: main.rs:12 in load; rank 0 is waiting" in text and stack == "main.rs:12 in load\nthread io: epoll"


def test_what_it_says_is_cut_and_does_not_steer_a_terminal(pair: Any) -> None:
    first, second = pair(stacks=True)
    with answering(second, "\x1b[31m\x00" + "a" * (3 << 20)):
        text, stack = wait_for_the_other(first)
    assert stack.startswith("\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}aaa") and len(stack) <= MAX_STACK
    assert len(text) < 2000


def test_a_client_that_offers_it_and_does_not_answer_is_said_to_be_silent(pair: Any) -> None:
    first, _ = pair(stacks=True)
    text, stack = wait_for_the_other(first)
    assert f"; now: {stack}; rank 0 is waiting" in text and stack.startswith("no answer")


def test_a_client_that_does_not_offer_it_is_not_asked(pair: Any) -> None:
    first, _ = pair()
    text, stack = wait_for_the_other(first)
    assert "now" not in text and not stack


def test_an_answer_that_nobody_asked_for_is_refused_and_the_rank_goes_on(pair: Any) -> None:
    first, second = pair(stacks=True)
    code, text, _ = failure(lambda: second.tell_stack("main.rs:12 in load"))
    assert code == "INVALID_ARGUMENT" and "without being asked" in text
    values = each(lambda rank: rank.submit(described(SUM, (1,)), data([1])).value, (first, second))
    assert values == [[2.0], [2.0]]
