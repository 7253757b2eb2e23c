"""Wrong credentials shut nobody out who shows a right one, from whatever address they came."""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request
from collections.abc import Callable

import grpc
import pytest
from tests.e2e.conftest import SECRET, Cluster
from tests.e2e.raw_client import Raw, failure
from tests.e2e.rejection_counts import counted

from collectived_proto.v1 import status_pb2, worker_pb2_grpc
from collectived_runtime.transport.hello import ANSWER_BYTES, NONCE_BYTES, PROOF_BYTES, LinkHello, proof

MOST = 5
RIGHT = (("authorization", f"Bearer {SECRET}"),)
LIMITED = "collectived_limit_refusals_total"


def own_address() -> str:
    """An address of this machine that is not the loopback; '' where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return ""
        found = str(probe.getsockname()[0])
    return "" if found.startswith("127.") else found


ADDRESS = own_address()
pytestmark = pytest.mark.skipif(not ADDRESS, reason="this machine has no address but the loopback")


class Place:
    """A worker that listens at an address of this machine, and at the loopback."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.near = self.far = ""
        with grpc.insecure_channel(cluster.addresses[0]) as channel:
            reply = worker_pb2_grpc.WorkerStub(channel).Status(status_pb2.StatusRequest(local_only=True), timeout=20)
        host, _, port = reply.workers[0].link_address.rpartition(":")
        self.links = host, int(port)
        self.remote = cluster.tcp_addresses[0]

    def status(self, address: str, metadata: tuple[tuple[str, str], ...]) -> str:
        """The code of an answer."""
        with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            try:
                stub.Status(status_pb2.StatusRequest(local_only=True), timeout=20, metadata=metadata)
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    def scrape(self, token: str) -> int:
        """The status of an answer; 0 where there is none."""
        request = urllib.request.Request(
            f"http://{self.cluster.metrics[1]}/metrics", headers={"Authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def link(self, secret: str, source: str = ADDRESS) -> str:
        """How far a peer comes that dials from that address."""
        with socket.create_connection(self.links, 20, (source, 0)) as guest:
            said = LinkHello(1, 0, 7, 8, 0, os.urandom(NONCE_BYTES)).encode()
            try:
                guest.sendall(said)
                answer = guest.recv(ANSWER_BYTES, socket.MSG_WAITALL)
                if not answer:
                    return "closed at once"
                guest.sendall(proof(secret, "dial", said, answer[:NONCE_BYTES]))
                guest.settimeout(0.2)
                return "refused" if guest.recv(1) == b"" else "?"
            except TimeoutError:
                return "waits to be expected"
            except ConnectionError:
                return "closed at once"


@pytest.fixture
def place(make_cluster: Callable[..., Cluster]) -> Place:
    options = ("--listen", f"{ADDRESS}:0", "--metrics", f"{ADDRESS}:0", "--max-login-failures", str(MOST))
    cluster = make_cluster(1, hosts=(("", ADDRESS),), worker_options=options)
    return Place(cluster)


def test_over_grpc_the_right_secret_is_heard_whatever_else_came_from_that_address(place: Place) -> None:
    wrong = (("authorization", "Bearer wrong"),)
    assert [place.status(place.remote, wrong) for _ in range(MOST)] == ["UNAUTHENTICATED"] * MOST
    assert place.status(place.remote, wrong) == "RESOURCE_EXHAUSTED"
    assert place.status(place.remote, ()) == "UNAUTHENTICATED"
    assert place.status(place.remote, RIGHT) == "OK"
    raw = Raw(place.cluster.addresses[0])  # over the Unix socket
    assert raw.status().sessions == 1
    raw.close()
    # the other doors know of the wrong ones too, and hear the right one
    assert place.scrape("wrong") == 429 and place.scrape(SECRET) == 200
    assert place.link("wrong") == "refused" and place.link(SECRET) == "waits to be expected"


def test_nothing_shown_is_no_failure(place: Place) -> None:
    assert {place.status(place.remote, ()) for _ in range(2 * MOST)} == {"UNAUTHENTICATED"}
    assert place.status(place.remote, RIGHT) == "OK"


def test_at_the_port_for_links_the_right_proof_is_heard_too(place: Place) -> None:
    assert [place.link("wrong") for _ in range(2 * MOST)] == ["refused"] * 2 * MOST
    assert place.link(SECRET) == "waits to be expected"
    assert place.status(place.remote, RIGHT) == "OK"
    assert met(place) == MOST + 1


def test_over_http_too_and_what_is_refused_late_is_counted(place: Place) -> None:
    before = counted(place.cluster.metrics[1])[LIMITED, "logins"]
    assert before == 0
    assert [place.scrape("wrong") for _ in range(MOST)] == [401] * (MOST - 1) + [429]
    assert place.scrape(SECRET) == 200
    code, text, _ = failure(lambda: Raw(place.remote, (("authorization", "Bearer wrong"),)))
    assert code == "RESOURCE_EXHAUSTED" and "max_login_failures" in text and SECRET not in text
    assert met(place) >= 1


def met(place: Place) -> int:
    """How often the worker has refused an address, as it tells over its Unix socket."""
    raw = Raw(place.cluster.addresses[0])
    found = sum(one.refused for one in raw.status().limits_met if one.limit == "logins")
    raw.close()
    return found


def test_the_loopback_is_not_counted(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(1, worker_options=("--listen", "127.0.0.1:0", "--max-login-failures", "2"))
    place = Place(cluster)
    assert {place.link(os.urandom(PROOF_BYTES).hex(), "127.0.0.1") for _ in range(6)} == {"refused"}
    assert {place.status(place.remote, (("authorization", "Bearer wrong"),)) for _ in range(6)} == {"UNAUTHENTICATED"}
    assert place.status(place.remote, RIGHT) == "OK" and place.link(SECRET, "127.0.0.1") == "waits to be expected"
