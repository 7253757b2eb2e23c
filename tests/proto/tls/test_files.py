"""Files of certificates: what is refused, and with which words."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.certificates import HERE, Signer, variables

from collectived_proto.tls.files import TlsFileError, TlsFiles, load_material


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path / "one")


def test_a_certificate_says_what_it_is_good_for_and_until_when(signer: Signer) -> None:
    material = load_material(signer.issue("host", days=30), serves=True)
    assert material.is_mutual
    assert material.identity is not None
    assert material.identity.names == HERE
    assert timedelta(days=29) < material.identity.not_after - datetime.now(UTC) < timedelta(days=31)


def test_without_an_authority_nobody_is_asked_for_a_certificate(signer: Signer) -> None:
    host = signer.issue("host")
    material = load_material(TlsFiles(host.cert, host.key))
    assert material.cert and not material.is_mutual and material.identity is None


def test_nothing_named_is_nothing() -> None:
    assert not TlsFiles()
    assert not load_material(TlsFiles()).is_mutual


def refused(files: TlsFiles, serves: bool = True) -> str:
    with pytest.raises(TlsFileError) as error:
        load_material(files, serves)
    return str(error.value)


def test_a_certificate_without_its_key_and_a_key_without_its_certificate(signer: Signer) -> None:
    host = signer.issue("host")
    assert refused(TlsFiles(cert=host.cert)).startswith("--tls-cert is given and --tls-key is not")
    assert refused(TlsFiles(key=host.key)).startswith("--tls-key is given and --tls-cert is not")


@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_a_file_that_is_not_there(signer: Signer, tmp_path: Path, which: str) -> None:
    host = signer.issue("host")
    missing = replace(host, **{which: tmp_path / "nowhere"})  # type: ignore[arg-type]
    said = refused(missing)
    assert said == f"--tls-{which} {tmp_path / 'nowhere'}: cannot be read: No such file or directory"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_a_fifo_into_which_nobody_writes_keeps_nobody_waiting(signer: Signer, tmp_path: Path, which: str) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    fifo = replace(signer.issue("host"), **{which: tmp_path / "fifo"})  # type: ignore[arg-type]
    assert refused(fifo).startswith(f"--tls-{which} {tmp_path / 'fifo'}: is no regular file")


@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_a_file_of_something_else(signer: Signer, which: str) -> None:
    host = signer.issue("host")
    path = getattr(host, which)
    path.write_text("no certificate of anybody's\n")
    assert f"--tls-{which} {path}" in refused(host)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o666])
def test_a_key_that_everybody_may_read(signer: Signer, mode: int) -> None:
    host = signer.issue("host")
    assert host.key is not None
    host.key.chmod(mode)
    said = refused(host)
    assert f"has mode {mode:04o}, by which all users of the host can read it: chmod 600 {host.key}" in said
    host.key.chmod(0o640)
    load_material(host)


def test_a_key_of_another_certificate(signer: Signer) -> None:
    host, other = signer.issue("host"), signer.issue("other")
    assert "key values mismatch" in refused(TlsFiles(host.cert, other.key, host.ca))


def test_a_certificate_that_has_expired_or_is_of_another_authority(signer: Signer, tmp_path: Path) -> None:
    late, host, other = signer.expired("late"), signer.issue("host"), Signer(tmp_path / "two")
    assert f"{late.cert} is refused by --tls-ca {late.ca}: certificate has expired; renew it" in refused(late)
    stranger = TlsFiles(host.cert, host.key, other.ca)
    assert "unable to get local issuer certificate; renew it" in refused(stranger)
    assert load_material(stranger).identity is None  # whom we call may know who has signed it


def test_a_certificate_for_calling_serves_nobody(signer: Signer) -> None:
    person = signer.issue("person", names=())
    assert load_material(person).identity is not None
    assert "unsuitable certificate purpose" in refused(person)


def test_callers_hear_of_their_variables(signer: Signer, tmp_path: Path) -> None:
    named = TlsFiles.from_environment(
        {**variables(signer.issue("host")), "COLLECTIVED_TLS_KEY": str(tmp_path / "nowhere")}
    )
    assert refused(named).startswith(f"COLLECTIVED_TLS_KEY {tmp_path / 'nowhere'}: cannot be read")
    assert not TlsFiles.from_environment({"COLLECTIVED_TLS_CA": ""})


def test_a_change_of_any_file_is_another_moment(signer: Signer) -> None:
    host = signer.issue("host")
    moments = {host.fingerprint()}
    signer.replace("host", signer.issued("host"))
    moments.add(host.fingerprint())
    assert host.ca is not None
    host.ca.write_bytes(host.ca.read_bytes() + b"\n")
    moments.add(host.fingerprint())
    host.ca.unlink()
    moments.add(host.fingerprint())
    assert len(moments) == 4
