"""`collectived certs`: what it makes, what it refuses to overwrite, and what OpenSSL thinks of it."""

from __future__ import annotations

import builtins
import json
import ssl
import stat
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from collectived_launcher.__main__ import run
from collectived_launcher.certs.authority import IssuedCertificate, issue, renew_certificate
from collectived_launcher.certs.folder import CertificateFolderError, list_entries, load_authority, write_issued
from collectived_proto.tls.files import TlsFiles, TlsMaterial, load_material


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with an authority, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    assert run(["certs", "init"]) == 0
    capsys.readouterr()
    return tmp_path / "certs"


def material(place: Path, serves: bool = True) -> TlsMaterial:
    return load_material(TlsFiles(place / "tls.crt", place / "tls.key", place / "ca.crt"), serves)


def shown(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["certs", "show", "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_host_certificate_names_the_host_what_is_given_and_the_loopback(folder: Path) -> None:
    assert run(["certs", "host", "node9.invalid=10.0.0.9,also.example"]) == 0
    identity = material(folder / "node9.invalid").identity
    assert identity is not None
    named = set(identity.names)
    assert named >= {"node9.invalid", "also.example", "localhost", "10.0.0.9", "127.0.0.1"}
    left = identity.not_after - datetime.now(UTC)
    assert timedelta(days=364) < left <= timedelta(days=365)


def test_a_person_can_call_and_not_serve(folder: Path) -> None:
    assert run(["certs", "client", "alice"]) == 0
    assert material(folder / "alice", serves=False).identity is not None
    with pytest.raises(ValueError, match="purpose"):
        material(folder / "alice", serves=True)


def test_keys_are_p256_and_nobody_else_may_read_them(folder: Path) -> None:
    assert run(["certs", "host", "localhost"]) == 0
    for key in (folder / "localhost/tls.key", folder / "authority/ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    for entry in list_entries(folder):
        public = entry.certificate.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey) and isinstance(public.curve, ec.SECP256R1)


def test_what_a_host_is_given_lets_it_sign_nothing(folder: Path) -> None:
    assert run(["certs", "host", "localhost"]) == 0
    assert sorted(path.name for path in (folder / "localhost").iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    place = folder / "localhost"
    with pytest.raises(ssl.SSLError):
        ssl.create_default_context(cafile=str(folder / "ca.crt")).load_cert_chain(folder / "ca.crt", place / "tls.key")


def test_an_authority_is_never_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert run(["certs", "init"]) == 1
    assert "is there already" in capsys.readouterr().err
    (folder / "ca.crt").unlink()
    assert run(["certs", "init"]) == 1  # its key alone is reason enough
    assert (folder / "authority/ca.key").read_bytes() == before[folder / "authority/ca.key"]


def test_a_certificate_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["certs", "client", "alice"]) == 0
    before = (folder / "alice/tls.key").read_bytes()
    assert run(["certs", "host", "alice"]) == 1
    assert "`collectived certs renew alice`" in capsys.readouterr().err
    assert (folder / "alice/tls.key").read_bytes() == before


@pytest.mark.parametrize("name", ["../x", "authority", "ca.crt", ".hidden", "a/b", "-x", ""])
def test_a_name_that_is_no_folder_of_its_own_is_refused(folder: Path, name: str) -> None:
    before = sorted(folder.rglob("*"))
    assert run(["certs", "client", "--", name]) == 1
    assert sorted(folder.rglob("*")) == before


def test_renewing_keeps_key_and_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["certs", "host", "localhost", "--days", "3"]) == 0
    key, former = (folder / "localhost/tls.key").read_bytes(), (folder / "localhost/tls.crt").read_bytes()
    before = material(folder / "localhost")
    assert run(["certs", "renew", "localhost"]) == 0
    after = material(folder / "localhost")
    assert (folder / "localhost/tls.key").read_bytes() == key
    assert after.cert != former
    assert before.identity is not None and after.identity is not None
    assert after.identity.names == before.identity.names


def test_what_is_due_is_renewed_and_the_rest_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, now = load_authority(folder), datetime.now(UTC)
    write_issued(folder, "late", issue(own, "late", (), 9, now - timedelta(days=7)))
    write_issued(folder, "early", issue(own, "early", (), 9, now))
    before = (folder / "early/tls.crt").read_bytes()
    assert {one["name"] for one in shown(capsys) if one["due"]} == {"late"}
    assert run(["certs", "renew"]) == 0
    assert {one["name"] for one in shown(capsys) if one["due"]} == set()
    assert (folder / "early/tls.crt").read_bytes() == before
    assert run(["certs", "renew"]) == 0
    assert "none is due" in capsys.readouterr().out


def test_nothing_outlives_its_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["certs", "init", "--days", "10"]) == 0
    assert run(["certs", "client", "alice", "--days", "90"]) == 0
    own, alice = list_entries(tmp_path / "certs")
    assert alice.expires <= own.expires
    longer = renew_certificate(load_authority(tmp_path / "certs"), alice.certificate, datetime.now(UTC))
    write_issued(tmp_path / "certs", "again", IssuedCertificate(longer, b""))
    assert max(entry.expires for entry in list_entries(tmp_path / "certs")) <= own.expires


def test_show_tells_what_has_expired_and_what_is_of_another_authority(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, now = load_authority(folder), datetime.now(UTC)
    write_issued(folder, "gone", issue(own, "gone", (), 1, now - timedelta(days=5)))
    assert run(["certs", "init", "--folder", str(tmp_path / "other")]) == 0
    write_issued(folder, "strange", issue(load_authority(tmp_path / "other"), "strange", (), 5, now))
    capsys.readouterr()
    assert run(["certs", "show"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "EXPIRED" in lines["gone"]
    assert "nothing: of another CA" in lines["strange"]
    assert run(["certs", "renew", "strange"]) == 1


def test_a_cluster_file_names_the_hosts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("two.toml").write_text(
        '[[hosts]]\nname = "a.invalid"\naddress = "10.9.8.7"\n\n[[hosts]]\nname = "b.invalid"\n'
    )
    assert run(["certs", "host", "--cluster", "two.toml"]) == 0
    said = capsys.readouterr().out
    assert "b.invalid has no address here: it can only be called by its name" in said
    named = {one["name"]: set(one["names"]) for one in shown(capsys)}
    assert "10.9.8.7" in named["a.invalid"] and "b.invalid" in named["b.invalid"]
    assert run(["certs", "host", "--cluster", "two.toml"]) == 0  # those that are there stay


def test_a_key_of_the_authority_that_everybody_may_read_is_refused(folder: Path) -> None:
    (folder / "authority/ca.key").chmod(0o644)
    with pytest.raises(
        CertificateFolderError, match="has mode 0644, by which all users of the host can read it: chmod 600"
    ):
        load_authority(folder)
    assert run(["certs", "client", "alice"]) == 1


def test_a_folder_without_an_authority_says_how_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["show"], ["renew"], ["client", "alice"]):
        assert run(["certs", *words]) == 1
        assert "make one with `collectived certs init --folder certs`" in capsys.readouterr().err


def test_without_the_library_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def missing(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> Any:
        if name.partition(".")[0] == "cryptography":
            raise ImportError(name)
        return real(name, globals, locals, fromlist, level)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "__import__", missing)
    assert run(["certs", "init"]) == 1
    assert "pip install 'collectived[tls]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_draft_that_was_left_behind_is_no_obstacle(folder: Path) -> None:
    assert run(["certs", "client", "alice"]) == 0
    (folder / "alice/tls.crt.new").write_text("half")
    assert run(["certs", "renew", "alice"]) == 0
    assert sorted(path.name for path in (folder / "alice").iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
