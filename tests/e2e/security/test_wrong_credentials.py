"""As Hivemind has it, short-lived tokens, and as Horovod, comparisons that take the same time: what is wrong, missing,
expired, replayed or for another group opens nothing at any door."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from tests.e2e.raw_client import Raw, failure
from tests.e2e.security.conftest import SECRET, Place
from tests.waiting import settle

from collectived_proto.ipc import messages
from collectived_proto.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from collectived_proto.viewing_token import viewing_token
from collectived_runtime.transport import connections
from collectived_runtime.transport import hello as hello_
from collectived_runtime.transport.connections import ConnectionServer

pytestmark = pytest.mark.timeout(120)
CI, OLD, DAY = "ci-token-of-these-tests", "old-token-of-these-tests", "day-token-of-these-tests"
RULES = ("--group-rules", "night/* = token:ci", "--group-rules", "/serving = token:day", "--device-rules", "CPU:7 =")


def bearer(shown: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {shown}"),)


def served(place: Place) -> tuple[str, Path]:
    """The address of a worker over TCP, and its file of tokens."""
    tokens = place.folder / "tokens"
    tokens.write_text(f"ci {CI}\nold {OLD} 2001-01-31\nday {DAY} 2999-01-31\n")
    tokens.chmod(0o600)
    return str(place.worker("--listen", ":0", "--client-tokens-file", str(tokens), *RULES)["addresses"][-1]), tokens


@pytest.fixture(scope="module")
def address(lasting: Place) -> str:
    return served(lasting)[0]


@pytest.mark.parametrize(
    "shown",
    [
        (),
        bearer(""),
        bearer("wrong"),
        bearer(SECRET[:-1]),
        bearer(f"{SECRET}x"),
        bearer(SECRET.swapcase()),
        bearer(OLD),
        (("authorization", f"Basic {SECRET}"),),
        (("authorization", SECRET),),
        (("x-authorization", f"Bearer {SECRET}"),),
        (("authorization", "Bearer wrong"), ("authorization", f"Bearer {SECRET}")),
    ],
)
def test_what_is_missing_wrong_or_expired_opens_no_session(address: str, shown: tuple[tuple[str, str], ...]) -> None:
    code, said, _ = failure(lambda: Raw(address, shown))
    assert code == "UNAUTHENTICATED" and not any(word in said for word in (SECRET, CI, OLD, DAY))


@pytest.mark.parametrize("token", [viewing_token(SECRET)])
def test_a_token_for_looking_opens_no_session(address: str, token: str) -> None:
    code, said, _ = failure(lambda: Raw(address, bearer(token)))
    assert code == "PERMISSION_DENIED" and "good for looking only" in said


class Job(Raw):
    """A client of a job and with a token."""

    def joins(self, name: str, device: str = "") -> None:
        request = worker_pb2.JoinRequest(session=self.opened.session, name=name, min_size=1, max_size=1, device=device)
        *_, last = self.stub.Join(request, timeout=20, metadata=self.metadata)
        assert last.HasField("joined")


@pytest.fixture
def client(address: str) -> Iterator[Callable[[str], Job]]:
    made: list[Job] = []

    def one(token: str) -> Job:
        made.append(Job(address, bearer(token)))
        return made[-1]

    yield one
    for job in made:
        job.close()


def test_a_token_for_another_group_does_not_open_a_group_that_is_kept(client: Callable[[str], Job]) -> None:
    ci, day = client(CI), client(DAY)
    day.joins("/serving")
    code, said, _ = failure(lambda: ci.joins("/serving"))
    assert code == "PERMISSION_DENIED" and "a rule of this worker (`group_rules`) restricts group" in said
    assert "day" not in said and "token" not in said  # nor who may
    ci.joins("/other")
    client(SECRET).joins("/serving")


@pytest.mark.parametrize(("job", "name"), [("night", "a"), ("night/a", "b"), ("day", "/serving"), ("/serving", "")])
def test_a_job_is_only_a_name_and_does_not_lead_around_a_rule(address: str, job: str, name: str) -> None:
    """What a rule keeps is the group's whole name, however a client puts it together."""
    outcomes = {}
    for token in (CI, DAY):
        with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            opening = worker_pb2.OpenSessionRequest(protocol=common_pb2.Protocol(lowest=1, highest=1), job=job)
            life = stub.OpenSession(opening, metadata=bearer(token))
            asked = worker_pb2.JoinRequest(session=next(life).opened.session, name=name, min_size=1, max_size=1)
            try:
                *_, last = stub.Join(asked, timeout=20, metadata=bearer(token))
                outcomes[token] = "joined" if last.HasField("joined") else ""
            except grpc.RpcError as error:
                outcomes[token] = error.code().name
            life.cancel()
    if not name:
        assert set(outcomes.values()) == {"INVALID_ARGUMENT"}
        return
    allowed, refused = (CI, DAY) if job.startswith("night") else (DAY, CI)
    assert outcomes == {allowed: "joined", refused: "PERMISSION_DENIED"}


def test_a_device_that_is_kept_is_not_offered_and_not_given(client: Callable[[str], Job]) -> None:
    ci, owner = client(CI), client(SECRET)
    assert len(ci.opened.devices) == 7 and len(owner.opened.devices) == 8
    code, said, _ = failure(lambda: ci.joins("mine", "CPU:7"))
    assert code == "NOT_FOUND" and "not a device of worker 0 for this session" in said
    ci.joins("mine", "CPU:6")
    owner.joins("ours", "CPU:7")


def test_a_token_that_is_taken_out_of_its_file_opens_nothing_from_then_on(place: Place) -> None:
    address, tokens = served(place)
    Raw(address, bearer(CI)).close()
    fresh = tokens.with_name("fresh")
    fresh.write_text("new new-token-of-these-tests\n")
    fresh.chmod(0o600)
    fresh.replace(tokens)
    assert failure(lambda: Raw(address, bearer(CI)))[0] == "UNAUTHENTICATED"
    Raw(address, bearer("new-token-of-these-tests")).close()


# At the connection server: one-time tokens of clients, and proofs of workers.


@pytest.fixture
def connection_server(folder: Path) -> Iterator[ConnectionServer]:
    made = ConnectionServer(0, SECRET, str(folder / "door"), ("127.0.0.1", 0))
    yield made
    made.close()


def knock(connection_server: ConnectionServer, token: bytes) -> bytes:
    """What somebody hears who shows a token; b"" is nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as guest:
        guest.settimeout(20)
        guest.connect(connection_server.unix_path)
        guest.send(messages.encode_hello(token))
        return guest.recv(100)


def welcome(connection: socket.socket) -> None:
    connection.send(b"welcome")
    connection.close()


def test_a_one_time_token_opens_once_and_one_bit_of_it_is_as_good_as_nothing(
    connection_server: ConnectionServer,
) -> None:
    token = os.urandom(messages.TOKEN_BYTES)
    connection_server.admit(token, welcome, os.getuid())
    for at in range(0, 128, 9):
        near = bytearray(token)
        near[at // 8] ^= 1 << at % 8
        assert knock(connection_server, bytes(near)) == b""
    assert knock(connection_server, token) == b"welcome"
    assert knock(connection_server, token) == b""


def test_a_one_time_token_that_has_expired_opens_nothing(
    connection_server: ConnectionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert connections.TOKEN_SECONDS == 10.0
    monkeypatch.setattr(connections, "TOKEN_SECONDS", 0.0)
    token = os.urandom(messages.TOKEN_BYTES)
    connection_server.admit(token, welcome)
    assert knock(connection_server, token) == b""
    settle(lambda: not connection_server._tokens)


def test_a_one_time_token_is_nothing_in_the_hands_of_another_user(connection_server: ConnectionServer) -> None:
    token = os.urandom(messages.TOKEN_BYTES)
    connection_server.admit(token, welcome, os.getuid() + 1)
    assert knock(connection_server, token) == b""


def test_tokens_are_found_by_a_digest_so_that_no_comparison_follows_what_is_shown(
    connection_server: ConnectionServer,
) -> None:
    token = os.urandom(messages.TOKEN_BYTES)
    connection_server.admit(token, welcome)
    settle(lambda: bool(connection_server._tokens))
    assert token not in connection_server._tokens and {len(digest) for digest in connection_server._tokens} == {32}


@pytest.mark.parametrize("shown", [bytes(32), b"\xff" * 32, hello_.proof("wrong", "dial", b"h", b"n")])
def test_a_proof_is_compared_whole_whatever_it_is(shown: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def watched(expected: bytes, given: bytes) -> bool:
        compared.append(given)
        return hmac.compare_digest(expected, given)

    class Watching:
        new = staticmethod(hmac.new)
        compare_digest = staticmethod(watched)

    monkeypatch.setattr(hello_, "hmac", Watching)
    with pytest.raises(hello_.HelloRefused, match="does not know this job's secret"):
        hello_.verify_proof(SECRET, "dial", b"h", b"n", shown)
    hello_.verify_proof(SECRET, "dial", b"h", b"n", hello_.proof(SECRET, "dial", b"h", b"n"))
    assert compared == [shown, hello_.proof(SECRET, "dial", b"h", b"n")]


def test_a_proof_that_was_overheard_opens_no_second_link(connection_server: ConnectionServer) -> None:
    """All that a link's opening says is said again, word for word."""
    said = hello_.LinkHello(1, 0, 7, 100, 3, bytes(hello_.NONCE_BYTES)).encode()

    def dial(proof: Callable[[bytes], bytes]) -> tuple[bytes, bytes]:
        with socket.create_connection(("127.0.0.1", connection_server.link_port), timeout=20) as guest:
            guest.sendall(said)
            answer = guest.recv(hello_.ANSWER_BYTES, socket.MSG_WAITALL)
            shown = proof(answer[: hello_.NONCE_BYTES])
            guest.sendall(shown)
            guest.shutdown(socket.SHUT_WR)
            return shown, answer

    shown, first = dial(lambda nonce: hello_.proof(SECRET, "dial", said, nonce))
    settle(lambda: len(connection_server._early_links) == 1)
    for link in connection_server._early_links.values():
        link[1].close()
    connection_server._early_links.clear()
    _, second = dial(lambda nonce: shown)
    assert first[: hello_.NONCE_BYTES] != second[: hello_.NONCE_BYTES]
    settle(lambda: not connection_server._handshakes)
    assert not connection_server._early_links


@pytest.mark.parametrize("side", ["accept", "dial"])
def test_where_there_is_no_secret_there_is_no_proof_of_it(side: str) -> None:
    nonce = os.urandom(hello_.NONCE_BYTES)
    with pytest.raises(hello_.HelloRefused, match="has no secret by which its peers are known: start all daemons"):
        hello_.verify_proof("", side, b"h", nonce, hello_.proof("", side, b"h", nonce))


@pytest.mark.parametrize("other", [(9, 0, 7, 100, 3), (1, 9, 7, 100, 3), (1, 0, 9, 100, 3), (1, 0, 7, 9, 3)])
def test_a_proof_for_one_group_and_generation_is_none_for_another(other: tuple[int, int, int, int, int]) -> None:
    one = hello_.LinkHello(1, 0, 7, 100, 3, bytes(hello_.NONCE_BYTES))
    nonce = os.urandom(hello_.NONCE_BYTES)
    with pytest.raises(hello_.HelloRefused):
        hello_.verify_proof(
            SECRET,
            "dial",
            hello_.LinkHello(*other, one.nonce).encode(),
            nonce,
            hello_.proof(SECRET, "dial", one.encode(), nonce),
        )
