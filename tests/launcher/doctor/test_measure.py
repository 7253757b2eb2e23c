"""The measuring session: what it finds, and that nobody gets in without the token."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from tests.launcher.doctor.healthy_facts import PEER

from collectived_launcher.doctor import measure
from collectived_launcher.doctor.facts import PeerFacts

ME = PeerFacts("a", "0.1.0", "3.11.7", {"numpy": "2.4.6"})
PATIENCE = 30.0


@contextmanager
def serving(token: str, within: float = PATIENCE) -> Iterator[tuple[int, Future[PeerFacts]]]:
    with measure.MeasurementServer("127.0.0.1", 0, token, PEER) as server, ThreadPoolExecutor(1) as pool:
        yield server.port, pool.submit(server.serve, within)


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_TRANSFER_SECONDS", 0.05)


def test_a_session_tells_who_how_far_how_fast_and_what_time() -> None:
    with serving("t") as (port, served):
        found = measure.measure_path("127.0.0.1", port, "t", ME)
        assert served.result(PATIENCE) == ME
    assert (found.trouble, found.peer, found.address) == ("", PEER, f"127.0.0.1:{port}")
    assert found.sent_per_second > 0 and found.received_per_second > 0
    assert found.round_trip > 0 and abs(found.ahead) <= found.round_trip + 1.0  # one host, one clock
    assert found.interface is not None and found.interface.name == "lo"


def test_another_token_is_refused_by_the_dialler_and_the_server_waits_on() -> None:
    with serving("right") as (port, served):
        found = measure.measure_path("127.0.0.1", port, "wrong", ME)
        assert found.refused and "another token" in found.trouble and found.peer is None
        assert measure.measure_path("127.0.0.1", port, "right", ME).trouble == ""
        assert served.result(PATIENCE) == ME


def test_a_stranger_learns_nothing_and_does_not_end_the_server() -> None:
    with serving("t") as (port, served):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n  ")
            assert stranger.recv(100) == b""
        assert measure.measure_path("127.0.0.1", port, "t", ME).trouble == ""
        served.result(PATIENCE)


def test_who_repeats_what_it_heard_is_refused() -> None:
    """The proof of one session is no proof in another: both nonces are in it."""
    with serving("t") as (port, served):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as thief:
            thief.sendall(measure._MAGIC + bytes(16))
            heard = thief.makefile("rb").read(48)
            thief.sendall(heard[16:])  # the server's own proof, sent back
            assert thief.recv(100) == b""
        assert measure.measure_path("127.0.0.1", port, "t", ME).trouble == ""
        served.result(PATIENCE)


def test_a_token_is_good_once() -> None:
    with serving("t") as (port, served):
        assert measure.measure_path("127.0.0.1", port, "t", ME).trouble == ""
        served.result(PATIENCE)
    assert measure.measure_path("127.0.0.1", port, "t", ME).trouble == "Connection refused"


def test_nobody_comes() -> None:
    with measure.MeasurementServer("127.0.0.1", 0, "t", PEER) as server, pytest.raises(TimeoutError):
        server.serve(0.05)


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_STEP_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        found = measure.measure_path("127.0.0.1", mute.getsockname()[1], "t", ME)
    assert found.trouble == "no answer within 0.2 s" and not found.refused


def test_a_peer_that_says_too_much_of_itself_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as talker,
        listener.accept()[0] as heard,
    ):
        talker.sendall((1 << 20).to_bytes(4, "big"))
        with pytest.raises(measure.MeasurementRefused, match="1048576 bytes"):
            measure._exchange_peer_facts(measure._Connection(heard), ME)


@pytest.mark.parametrize("said", [None, [], {"hostname": "b"}, {"hostname": "b", "more": 1}])
def test_a_peer_that_says_something_else_is_refused(said: object) -> None:
    with pytest.raises(measure.MeasurementRefused, match="something else"):
        measure._parse_peer(said)


def test_tokens_differ() -> None:
    assert len({measure.new_token() for _ in range(100)}) == 100
