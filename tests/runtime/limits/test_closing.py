"""Closing what may block: threads that are held up do not pile up, nor does what waits for them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from tests.runtime.limits.test_passed_descriptors import lingering
from tests.waiting import settle

from collectived_runtime.limits import closing
from collectived_runtime.limits.closing import MOST_WAITING, PatientCloser, must_wait

FORBIDDEN_CALL = 9999


def is_closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


@pytest.fixture(params=["with close_range", "where close_range is forbidden"])
def closer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PatientCloser:
    if request.param != "with close_range":
        monkeypatch.setattr(closing, "_SYS_CLOSE_RANGE", FORBIDDEN_CALL)
    return PatientCloser()


def test_what_is_closed_is_closed_for_the_other_side_too_and_nothing_else_is(closer: PatientCloser) -> None:
    kept, other = os.pipe()
    pairs = [socket.socketpair() for _ in range(2 * MOST_WAITING)]
    for one, _ in pairs:
        closer.close(one.detach())
    for _, far in pairs:
        far.settimeout(20)
        assert far.recv(1) == b""
        far.close()
    os.write(other, b"x")
    assert os.read(kept, 1) == b"x"
    os.close(other)
    assert os.read(kept, 1) == b"", "no thread keeps what is not to be closed"
    os.close(kept)


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Descriptors that hold up what closes them: nothing but a plain close is to be had here."""
    monkeypatch.setattr(closing, "_SYS_CLOSE_RANGE", FORBIDDEN_CALL)
    pairs = [lingering() for _ in range(closing._MOST_HELD_UP)]
    yield [one for one, _ in pairs]
    for _, peer in pairs:
        peer.close()


def test_where_threads_are_held_up_what_comes_waits_for_a_batch(held_up: list[socket.socket]) -> None:
    closer, before = PatientCloser(), threading.active_count()
    for one in held_up:
        number = one.detach()
        closer.close(number)
        settle(partial(is_closed, number))  # its own thread has it
    pairs = [socket.socketpair() for _ in range(MOST_WAITING)]
    for one, _ in pairs[:-1]:
        closer.close(one.detach())
    far = pairs[0][1]
    far.settimeout(0.3)
    with pytest.raises(TimeoutError):
        far.recv(1)
    assert threading.active_count() <= before + len(held_up) + 1
    closer.close(pairs[-1][0].detach())
    for _, far in pairs:
        far.settimeout(20)
        assert far.recv(1) == b""
        far.close()


@pytest.mark.parametrize(
    ("held_up", "waiting", "wait"), [(0, 1, False), (7, 1, False), (8, 1, True), (8, 63, True), (8, 64, False)]
)
def test_a_thread_more_is_for_a_full_batch(held_up: int, waiting: int, wait: bool) -> None:
    assert must_wait(held_up, waiting) == wait
