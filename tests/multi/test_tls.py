"""Daemons over TLS: who gets in and who does not, what is said to them, and new certificates while they run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
from tests.certificates import Signer, flags, variables
from tests.multi.conftest import Cluster

import collectived as cd
from collectived_proto.tls.files import Files

MakeCluster = Callable[..., Cluster]
TLS = ("COLLECTIVED_TLS_CA", "COLLECTIVED_TLS_CERT", "COLLECTIVED_TLS_KEY")


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer(tmp_path_factory.mktemp("another"))


@pytest.fixture(scope="module")
def mutual(signer: Signer, make_cluster: MakeCluster) -> Cluster:
    """Two workers who ask everybody over TCP for a certificate, and encrypt their links."""
    told = flags(signer.issue("host"))
    return make_cluster(2, options=told, worker_options=(*told, "--listen", "127.0.0.1:0"))


@pytest.fixture(scope="module")
def served(signer: Signer, make_cluster: MakeCluster) -> Cluster:
    """A worker that proves who it is, and asks others for the secret."""
    host = signer.issue("served")
    told = flags(Files(host.cert, host.key))
    return make_cluster(1, worker_options=(*told, "--listen", "127.0.0.1:0"))


@pytest.fixture
def person(signer: Signer) -> Files:
    """A certificate that is good for calling only."""
    return signer.issue("person", names=())


@contextlib.contextmanager
def environment(told: Mapping[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in (*TLS, "COLLECTIVED_SECRET", "COLLECTIVED_SECRET_FILE"):
            patch.delenv(name, raising=False)
        for name, value in told.items():
            patch.setenv(name, value)
        yield


def sums(addresses: list[str], told: Mapping[str, str]) -> list[Any]:
    """What two ranks get who sum up their ranks and a large array, called at these addresses."""
    from concurrent.futures import ThreadPoolExecutor

    def one(rank: int) -> Any:
        with (
            cd.connect(addresses[rank]) as session,
            session.join("sum", 2, rank=rank) as group,
        ):
            whole = group.all_reduce("sum", np.full(300_000, rank + 1.0))
            return session.transport, float(whole[0]), float(whole.sum())

    with environment(told), ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_clients_with_certificates_need_no_secret_and_links_are_encrypted(mutual: Cluster, person: Files) -> None:
    assert sums(mutual.tcp_addresses, variables(person)) == [("grpc", 3.0, 900_000.0)] * 2


def test_local_clients_need_no_certificate(mutual: Cluster) -> None:
    assert sums(mutual.addresses, {}) == [("shared memory", 3.0, 900_000.0)] * 2


def refusal(address: str, told: Mapping[str, str], error: type[Exception] = cd.errors.UnavailableError) -> str:
    with environment(told), pytest.raises(error) as refused:
        cd.connect(address, timeout=10)
    return str(refused.value)


def test_who_shows_no_certificate_is_told_to_set_one(mutual: Cluster, person: Files) -> None:
    said = refusal(mutual.tcp_addresses[0], variables(Files(ca=person.ca)))
    assert "it asks who calls: set COLLECTIVED_TLS_CERT and COLLECTIVED_TLS_KEY" in said


def test_plain_text_at_a_tls_address_is_told_what_to_set(mutual: Cluster) -> None:
    said = refusal(mutual.tcp_addresses[0], {"COLLECTIVED_SECRET": "the-secret-of-these-tests"})
    assert "it speaks TLS, and was called in plain text: name the certificate of its authority" in said


def test_a_certificate_of_another_authority_is_refused(mutual: Cluster, stranger: Signer, person: Files) -> None:
    theirs = stranger.issue("person", names=())
    said = refusal(mutual.tcp_addresses[0], {**variables(theirs), "COLLECTIVED_TLS_CA": str(person.ca)})
    assert f"it does not accept the certificate of {theirs.cert} (COLLECTIVED_TLS_CERT)" in said


def test_a_worker_of_another_authority_is_not_trusted(mutual: Cluster, stranger: Signer) -> None:
    said = refusal(mutual.tcp_addresses[0], variables(stranger.issue("person", names=())))
    assert "unable to get local issuer certificate; its certificate is of another authority" in said


def test_an_expired_certificate_is_refused_before_anybody_is_called(mutual: Cluster, signer: Signer) -> None:
    said = refusal(mutual.tcp_addresses[0], variables(signer.expired("late")), ValueError)
    assert "certificate has expired; renew it" in said


def test_an_expired_certificate_is_refused_by_the_worker(mutual: Cluster, signer: Signer) -> None:
    late = signer.expired("later")
    assert late.cert and late.key and late.ca
    credentials = grpc.ssl_channel_credentials(late.ca.read_bytes(), late.key.read_bytes(), late.cert.read_bytes())
    with environment({}), pytest.raises(cd.errors.UnavailableError):
        cd.connect(mutual.tcp_addresses[0], timeout=10, credentials=credentials)


def test_a_worker_is_called_by_a_name_that_its_certificate_has(mutual: Cluster, person: Files) -> None:
    port = mutual.tcp_addresses[0].rpartition(":")[2]
    with environment(variables(person)), cd.connect(f"localhost:{port}") as session:
        assert session.worker == "/job:worker/task:0"
    said = refusal(f"127.0.0.2:{port}", variables(person), Exception)
    assert said  # nobody listens there


def test_a_wrong_name_is_refused_and_said(signer: Signer, make_cluster: MakeCluster, person: Files) -> None:
    elsewhere = signer.issue("elsewhere", names=("elsewhere.example",))
    cluster = make_cluster(1, worker_options=(*flags(elsewhere), "--listen", "127.0.0.1:0"))
    said = refusal(cluster.tcp_addresses[0], variables(person))
    assert "IP address mismatch, certificate is not valid for '127.0.0.1'" in said
    assert "call it by a name that its certificate has" in said
