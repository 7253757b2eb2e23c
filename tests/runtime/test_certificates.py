"""The certificates of a daemon: read again when their files change, and kept when what is there now is of no use."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.certificates import Signer

from collectived_proto.configuration.daemons import CoordinatorSettings
from collectived_proto.tls.files import Files
from collectived_runtime.cannot_start import CannotStart
from collectived_runtime.certificates import Certificates, certificates


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path)


def settings(files: Files) -> CoordinatorSettings:
    return CoordinatorSettings(listen=("unix:/x",), tls_cert=files.cert, tls_key=files.key, tls_ca=files.ca)


def test_what_has_not_changed_is_not_read_again(signer: Signer) -> None:
    tls = Certificates(signer.issue("host"))
    assert tls.current() is tls.current()


def test_what_has_changed_is_in_use_at_once(signer: Signer) -> None:
    tls = Certificates(signer.issue("host"))
    before = tls.current()
    renewed = signer.issued("host")
    signer.replace("host", renewed)
    after = tls.current()
    assert after is not before
    assert after.material.cert == renewed.certificate
    assert after.serving is not before.serving


def test_what_is_broken_after_a_change_is_said_once_and_the_former_stays(
    signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    host = signer.issue("host")
    assert host.cert is not None
    tls = Certificates(host)
    before = tls.current()
    host.cert.write_text("half a certificate")
    with caplog.at_level(logging.WARNING):
        assert [tls.current() for _ in range(3)] == [before] * 3
    (record,) = caplog.records
    assert f"the former ones stay: --tls-cert {host.cert}" in record.getMessage()
    renewed = signer.issued("host")
    signer.replace("host", renewed)
    assert tls.current().material.cert == renewed.certificate


def test_a_certificate_that_has_expired_meanwhile_is_not_taken(
    signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Certificates(signer.issue("host"))
    before = tls.current()
    signer.expired("host")
    assert tls.current() is before
    assert "certificate has expired" in caplog.text


def test_what_a_daemon_speaks_follows_from_what_it_is_given(signer: Signer) -> None:
    host = signer.issue("host")
    both, own, authority = Certificates(host), Certificates(Files(host.cert, host.key)), Certificates(Files(ca=host.ca))
    assert [(one.serves, one.mutual, one.dials) for one in (both, own, authority, Certificates(Files()))] == [
        (True, True, True),
        (True, False, True),
        (False, False, True),
        (False, False, False),
    ]
    assert (both.current().linking is None, own.current().linking is None) == (False, True)


def test_an_authority_alone_serves_nobody_in_plain_text(signer: Signer) -> None:
    told = settings(Files(ca=signer.ca))
    assert not certificates(told, ["unix:/x"]).serves
    with pytest.raises(
        CannotStart, match="127.0.0.1:7450 would be served in plain text: give --tls-cert and --tls-key"
    ):
        certificates(told, ["unix:/x", "127.0.0.1:7450"])


def test_what_cannot_be_used_keeps_a_daemon_from_starting(signer: Signer) -> None:
    with pytest.raises(CannotStart, match="certificate has expired; renew it"):
        certificates(settings(signer.expired("late")), [])
