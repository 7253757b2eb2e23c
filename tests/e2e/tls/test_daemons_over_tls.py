"""Daemons over TLS: who gets in and who does not, what is said to them, and new certificates while they run."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import numpy as np
import pytest
from tests.certificates import Signer, flags, variables
from tests.e2e.conftest import SECRET, Cluster, Daemon

import collectived as cd
from collectived_launcher.__main__ import run
from collectived_proto.tls.files import TlsFiles, client_context, load_material
from collectived_proto.viewing_token import viewing_token

ROOT = Path(__file__).parents[3]
SUM = """
import collectived as cd
with cd.connect() as session, session.join() as group:
    print("sum", group.all_reduce("sum", group.rank + 1.0))
"""
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
    """A worker that proves who it is, and asks others for the secret; its environment allows suites of TLS 1.2."""
    host = signer.issue("served")
    told = flags(TlsFiles(host.cert, host.key))
    with environment({"GRPC_SSL_CIPHER_SUITES": "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256"}):
        return make_cluster(1, worker_options=(*told, "--listen", "127.0.0.1:0"))


@pytest.fixture
def person(signer: Signer) -> TlsFiles:
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

    def one(rank: int) -> Any:
        with (
            cd.connect(addresses[rank]) as session,
            session.join("sum", 2, rank=rank) as group,
        ):
            whole = group.all_reduce("sum", np.full(300_000, rank + 1.0))
            return session.transport, float(whole[0]), float(whole.sum())

    with environment(told), ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_clients_with_certificates_need_no_secret(mutual: Cluster, person: TlsFiles) -> None:
    assert sums(mutual.tcp_addresses, variables(person)) == [("grpc", 3.0, 900_000.0)] * 2


def test_local_clients_need_no_certificate(mutual: Cluster) -> None:
    assert sums(mutual.addresses, {}) == [("shared memory", 3.0, 900_000.0)] * 2


def refusal(address: str, told: Mapping[str, str], error: type[Exception] = cd.errors.UnavailableError) -> str:
    with environment(told), pytest.raises(error) as refused:
        cd.connect(address, timeout=10)
    return str(refused.value)


def test_who_shows_no_certificate_is_told_to_set_one(mutual: Cluster, person: TlsFiles) -> None:
    said = refusal(mutual.tcp_addresses[0], variables(TlsFiles(ca=person.ca)))
    assert "it demands a certificate: set COLLECTIVED_TLS_CERT and COLLECTIVED_TLS_KEY" in said


def test_plain_text_at_a_tls_address_is_told_what_to_set(mutual: Cluster) -> None:
    said = refusal(mutual.tcp_addresses[0], {"COLLECTIVED_SECRET": "the-secret-of-these-tests"})
    assert "it speaks TLS, and was called in plain text: name the certificate of its authority" in said


def test_a_certificate_of_another_authority_is_refused(mutual: Cluster, stranger: Signer, person: TlsFiles) -> None:
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


def test_a_worker_is_called_by_any_name_that_its_certificate_has(mutual: Cluster, person: TlsFiles) -> None:
    port = mutual.tcp_addresses[0].rpartition(":")[2]
    with environment(variables(person)), cd.connect(f"localhost:{port}") as session:
        assert session.worker == "/job:worker/task:0"


def test_a_wrong_name_is_refused_and_said(signer: Signer, make_cluster: MakeCluster, person: TlsFiles) -> None:
    elsewhere = signer.issue("elsewhere", names=("elsewhere.example",))
    cluster = make_cluster(1, worker_options=(*flags(elsewhere), "--listen", "127.0.0.1:0"))
    said = refusal(cluster.tcp_addresses[0], variables(person))
    assert "IP address mismatch, certificate is not valid for '127.0.0.1'" in said
    assert "call it by a name that its certificate has" in said


def test_over_tls_without_an_authority_the_secret_is_still_needed(served: Cluster, signer: Signer) -> None:
    trust = {"COLLECTIVED_TLS_CA": str(signer.ca)}
    assert "needs the job's secret" in refusal(served.tcp_addresses[0], trust, cd.errors.UnauthenticatedError)
    with environment({**trust, "COLLECTIVED_SECRET": SECRET}), cd.connect(served.tcp_addresses[0]) as session:
        assert session.transport == "grpc"


@pytest.mark.parametrize(("version", "served_with"), [("TLSv1_2", None), ("TLSv1_3", "TLSv1.3")])
def test_nothing_older_than_tls_1_3_is_spoken(
    served: Cluster, signer: Signer, version: str, served_with: str | None
) -> None:
    context = ssl.create_default_context(cafile=str(signer.ca))
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
    host, _, port = served.tcp_addresses[0].rpartition(":")
    spoken = None
    with (
        contextlib.suppress(ssl.SSLError, ConnectionError),
        socket.create_connection((host, int(port)), 20) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        spoken = secured.version()
    assert spoken == served_with


def test_tls_at_a_plain_address_is_told_to_leave_it(make_cluster: MakeCluster, person: TlsFiles) -> None:
    plain = make_cluster(1, worker_options=("--listen", "127.0.0.1:0"))
    said = refusal(plain.tcp_addresses[0], variables(person))
    assert "it speaks plain text, and was called with TLS" in said
    assert "unset COLLECTIVED_TLS_CERT, COLLECTIVED_TLS_KEY, COLLECTIVED_TLS_CA" in said


def test_a_viewing_token_or_the_secret_alone_opens_nothing_where_certificates_are_asked_for(
    mutual: Cluster, person: TlsFiles
) -> None:
    told = {"COLLECTIVED_TLS_CA": str(person.ca), "COLLECTIVED_SECRET": SECRET}
    assert "it demands a certificate" in refusal(mutual.tcp_addresses[0], told)


def subject(address: str, files: TlsFiles) -> bytes:
    """The certificate that is shown there."""
    material = load_material(files)
    host, _, port = address.rpartition(":")
    context = client_context(material)
    with (
        socket.create_connection((host, int(port)), 10) as plain,
        context.wrap_socket(plain, server_hostname=host) as up,
    ):
        shown = up.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def test_new_certificates_are_in_use_at_once_and_sessions_go_on(
    signer: Signer, make_cluster: MakeCluster, person: TlsFiles
) -> None:
    told = flags(signer.issue("changing"))
    cluster = make_cluster(2, options=told, worker_options=(*told, "--listen", "127.0.0.1:0"))
    address = cluster.tcp_addresses[0]
    changed = Event()

    def body(group: cd.Group) -> list[float]:
        found = [group.all_reduce("sum", 1.0)]
        if group.rank == 0:
            before = subject(address, person)
            signer.replace("changing", signer.issued("changing"))
            assert subject(address, person) != before
            changed.set()
        assert changed.wait(20)
        return [*found, group.all_reduce("sum", 2.0)]

    with environment(variables(person)):
        cluster.addresses = cluster.tcp_addresses
        assert cluster.run(2, body) == [[2.0, 4.0]] * 2
        signer.expired("changing")
        before = subject(address, person)
        assert cluster.run(2, lambda group: group.all_reduce("sum", 1.0)) == [2.0, 2.0], "the former ones stay"
        assert subject(address, person) == before
    assert cluster.workers[0].log.count("certificates have changed and cannot be used") == 1
    assert "certificate has expired" in cluster.workers[0].log


def test_workers_come_back_with_the_certificates_that_are_there_now(tmp_path: Path) -> None:
    """The channel to the coordinator is made anew when the one that it was made with is of no use any more."""
    host = Signer(tmp_path / "former").issue("renewed")
    coordinator = Daemon("coordinator", "--listen", "127.0.0.1:0", *flags(host))
    address = str(coordinator.wait_ready()["address"])
    folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
    worker = Daemon("worker", "--task", "0", "--folder", str(folder), "--coordinator", address, *flags(host))
    try:
        local = str(worker.wait_ready()["address"])
        coordinator.close()
        fresh = Signer(tmp_path / "new").issue("renewed")
        for old, new in ((host.key, fresh.key), (host.cert, fresh.cert), (host.ca, fresh.ca)):
            assert old and new
            shutil.copy(new, old)
        coordinator = Daemon("coordinator", "--listen", address, *flags(fresh))
        coordinator.wait_ready()
        with environment({}), cd.connect(local, timeout=20) as session, session.join("again", 1, timeout=20) as group:
            assert group.all_reduce("sum", 1.0) == 1.0
    finally:
        worker.close()
        coordinator.close()
        folder.rmdir()


def test_a_worker_that_speaks_plain_text_to_a_coordinator_with_tls_says_so(mutual: Cluster, signer: Signer) -> None:
    host = signer.issue("asks")
    coordinator = Daemon("coordinator", "--listen", "127.0.0.1:0", *flags(host))
    folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
    try:
        place = (
            "--folder",
            str(folder),
            "--coordinator",
            str(coordinator.wait_ready()["address"]),
            "--patience",
            "60s",
        )
        for task in (("--task", "0"), ()):
            with pytest.raises(cd.errors.UnavailableError, match="it speaks TLS, and was called in plain text"):
                Daemon("worker", *task, *place).wait_ready()
    finally:
        coordinator.close()
        folder.rmdir()


def test_a_plain_worker_gets_no_link_to_an_encrypted_one(signer: Signer) -> None:
    folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
    coordinator = Daemon("coordinator", "--listen", f"unix:{folder}/c.sock")
    at = ("--coordinator", str(coordinator.wait_ready()["address"]), "--folder", str(folder))
    workers = [Daemon("worker", "--task", "0", *at), Daemon("worker", "--task", "1", *at, *flags(signer.issue("one")))]
    served = [worker.wait_ready() for worker in workers]
    addresses = [str(told["address"]) for told in served]
    person = signer.issue("looks", names=())
    assert subject(str(served[1]["link_address"]), person), "links are encrypted below the hello"
    with pytest.raises(OSError):
        subject(str(served[0]["link_address"]), person)

    def one(rank: int) -> str:
        with cd.connect(addresses[rank]) as session, session.join("two", 2, rank=rank, timeout=20) as group:
            with pytest.raises(cd.errors.UnavailableError) as refused:
                group.all_reduce("sum", 1.0, options=cd.CommunicationOptions(timeout_seconds=20))
            return str(refused.value)

    try:
        with environment({}), ThreadPoolExecutor(2) as pool:
            for said in pool.map(one, range(2)):
                assert "it speaks TLS on its links, and this worker does not" in said
    finally:
        for daemon in (*workers, coordinator):
            daemon.close()
        folder.rmdir()


@pytest.mark.parametrize("kind", ["coordinator", "worker"])
def test_files_that_cannot_be_used_are_named_at_the_start(signer: Signer, tmp_path: Path, kind: str) -> None:
    host = signer.issue(f"open-{kind}")
    assert host.key is not None
    host.key.chmod(0o644)
    place = ["--listen", "127.0.0.1:0"]
    if kind == "worker":
        place = ["--task", "0", "--folder", str(tmp_path / "w"), "--coordinator", "unix:/nowhere"]
    with pytest.raises(cd.errors.UnavailableError, match=f"--tls-key {host.key}: has mode 0644, by which all users"):
        Daemon(kind, *place, *flags(host)).wait_ready()
    assert not (tmp_path / "w").exists()


def test_pages_are_encrypted_too_and_still_ask_for_a_token(signer: Signer, tmp_path: Path) -> None:
    daemon = Daemon(
        "coordinator", "--listen", f"unix:{tmp_path}/c", "--metrics", "0", "--http", "0", *flags(signer.issue("page"))
    )
    try:
        told = daemon.wait_ready()
        assert told["page"]["url"].startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(signer.ca))
        admitted = {"Authorization": f"Bearer {viewing_token(SECRET)}"}
        for url in (f"https://{told['metrics']}/metrics", f"{told['page']['url']}status.json"):
            with urlopen(Request(url, headers=admitted), context=trust, timeout=10) as answer:
                assert answer.status == 200 and answer.read()
            with pytest.raises(HTTPError, match="401") as refused:
                urlopen(url, context=trust, timeout=10)
            refused.value.close()
        address = ("127.0.0.1", int(told["metrics"].rpartition(":")[2]))
        with socket.create_connection(address, 10) as plain, contextlib.suppress(ConnectionError):
            plain.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert not plain.recv(4096).startswith(b"HTTP")
    finally:
        daemon.close()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("status", "--json"), 0, '"task": 1'),
        (("trace", "-o", "out.json"), 0, "out.json"),
        (("drain", "--group", "nobody"), 1, "nobody"),
    ],
)
def test_commands_call_workers_over_tls_where_the_environment_says_so(
    mutual: Cluster,
    person: TlsFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    status: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    where = {"COLLECTIVED_WORKER": mutual.tcp_addresses[0]}
    with environment({**where, **variables(person)}):
        assert run(words) == status
    told = capsys.readouterr()
    assert said in told.out + told.err
    with environment(where):
        assert run(words) == 3
    assert "it speaks TLS, and was called in plain text" in capsys.readouterr().err


def test_a_client_of_generated_code_alone(mutual: Cluster, person: TlsFiles) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        told = {"COLLECTIVED_WORKER": mutual.tcp_addresses[rank], "RANK": str(rank), "WORLD_SIZE": "2"}
        names = {"COLLECTIVED_JOB": "alone", "COLLECTIVED_GROUP": "alone"}
        return subprocess.Popen(
            [sys.executable, str(ROOT / "examples/grpc_only.py")],
            env={**os.environ, **told, **names, **variables(person)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    for rank, process in enumerate([start(0), start(1)]):
        said, _ = process.communicate(timeout=50)
        assert f"rank {rank}: done" in said


def test_a_launch_tells_its_daemons(signer: Signer, tmp_path: Path) -> None:
    """What the environment of its user names is for calling, and is no host's."""
    host = signer.issue("launched")
    folder = tempfile.mkdtemp(prefix="cd-", dir="/tmp")
    person = signer.issue("somebody", names=())
    line = ["launch", "--workers", "2", "--clients", "1", "--metrics", *flags(host), "--", sys.executable, "-c", SUM]
    told = {**os.environ, "XDG_RUNTIME_DIR": folder, **variables(person)}
    try:
        for words, scheme in ((line, "https"), ([word for word in line if word not in flags(host)], "http")):
            command = [sys.executable, "-m", "collectived_launcher", *words]
            done = subprocess.run(command, env=told, text=True, capture_output=True, timeout=50)
            assert done.returncode == 0, done.stderr
            assert done.stdout.count("sum 3.0") == 2
            assert f"metrics of worker 1: {scheme}://127.0.0.1:" in done.stdout + done.stderr
    finally:
        shutil.rmtree(folder)


def test_a_worker_without_an_authority_trusts_whom_grpc_does(signer: Signer, monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS for servers alone: the secret is what callers show."""
    host = signer.issue("alone")
    told = flags(TlsFiles(host.cert, host.key))
    coordinator = Daemon("coordinator", "--listen", "127.0.0.1:0", *told)
    folder = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
    place = (
        "--folder",
        str(folder),
        "--coordinator",
        str(coordinator.wait_ready()["address"]),
        "--patience",
        "5s",
        *told,
    )
    try:
        with pytest.raises(cd.errors.UnavailableError, match="the coordinator at .* did not answer"):
            Daemon("worker", "--task", "0", *place[:-4], "--patience", "1s", *told).wait_ready()
        monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(host.ca))
        worker = Daemon("worker", *place)
        assert worker.wait_ready()["task"] == 0
        worker.close()
    finally:
        coordinator.close()
        folder.rmdir()
