"""The certificates of a daemon: read again when their files change, and kept when what is there now is of no use."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.certificates import Signer

from collectived_proto.config.daemons import CoordinatorSettings
from collectived_proto.tls.files import TlsFiles
from collectived_runtime.auth.certificates import Certificates, load_certificates
from collectived_runtime.startup_error import StartupError


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path)


def settings(files: TlsFiles) -> CoordinatorSettings:
    return CoordinatorSettings(listen=("unix:/x",), tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)


def test_what_has_not_changed_is_not_read_again(signer: Signer) -> None:
    tls = Certificates(signer.issue("host"))
    assert tls.load_current() is tls.load_current()


def test_what_has_changed_is_in_use_at_once(signer: Signer) -> None:
    tls = Certificates(signer.issue("host"))
    before = tls.load_current()
    renewed = signer.issued("host")
    signer.replace("host", renewed)
    after = tls.load_current()
    assert after is not before
    assert after.material.cert == renewed.certificate
    assert after.http_server is not before.http_server


def test_what_is_broken_after_a_change_is_said_once_and_the_former_stays(
    signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    host = signer.issue("host")
    assert host.cert is not None
    tls = Certificates(host)
    before = tls.load_current()
    host.cert.write_text("half a certificate")
    with caplog.at_level(logging.WARNING):
        assert [tls.load_current() for _ in range(3)] == [before] * 3
    (record,) = caplog.records
    assert f"the former ones stay: --tls-cert {host.cert}" in record.getMessage()
    renewed = signer.issued("host")
    signer.replace("host", renewed)
    assert tls.load_current().material.cert == renewed.certificate


def test_a_certificate_that_has_expired_meanwhile_is_not_taken(
    signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Certificates(signer.issue("host"))
    before = tls.load_current()
    signer.expired("host")
    assert tls.load_current() is before
    assert "certificate has expired" in caplog.text


def test_what_a_daemon_speaks_follows_from_what_it_is_given(signer: Signer) -> None:
    host = signer.issue("host")
    both, own, authority = (
        Certificates(host),
        Certificates(TlsFiles(host.cert, host.key)),
        Certificates(TlsFiles(ca=host.ca)),
    )
    assert [
        (one.has_server_tls, one.is_mutual, one.has_client_tls)
        for one in (both, own, authority, Certificates(TlsFiles()))
    ] == [
        (True, True, True),
        (True, False, True),
        (False, False, True),
        (False, False, False),
    ]
    assert (both.load_current().link_server is None, own.load_current().link_server is None) == (False, True)


def test_an_authority_alone_serves_nobody_in_plain_text(signer: Signer) -> None:
    told = settings(TlsFiles(ca=signer.ca))
    assert not load_certificates(told, ["unix:/x"]).has_server_tls
    with pytest.raises(
        StartupError, match="127.0.0.1:7450 would be served in plain text: give --tls-cert and --tls-key"
    ):
        load_certificates(told, ["unix:/x", "127.0.0.1:7450"])


def test_what_cannot_be_used_keeps_a_daemon_from_starting(signer: Signer) -> None:
    with pytest.raises(StartupError, match="certificate has expired; renew it"):
        load_certificates(settings(signer.expired("late")), [])
