"""How the command calls daemons: with which certificates, and what is said where they cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.certificates import Signer, variables

from collectived_launcher.__main__ import run


@pytest.mark.parametrize("words", [["status"], ["trace"], ["drain"]])
def test_files_that_cannot_be_used_are_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    late = Signer(tmp_path).expired("late")
    for name, value in variables(late).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert run([*words, "--worker", "127.0.0.1:1"]) == 2
    assert f"COLLECTIVED_TLS_CERT {late.cert} is refused by COLLECTIVED_TLS_CA" in capsys.readouterr().err


def test_unix_sockets_are_called_without_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLLECTIVED_TLS_CA", str(tmp_path / "nowhere"))
    assert run(["status", "--worker", f"unix:{tmp_path}/nobody.sock"]) == 3
    assert "COLLECTIVED_TLS_CA" not in capsys.readouterr().err


def test_nobody_at_all_is_told_apart_from_somebody_who_speaks_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables(Signer(tmp_path).issue("person", names=())).items():
        monkeypatch.setenv(name, value)
    assert run(["status", "--worker", "127.0.0.1:1"]) == 3
    said = capsys.readouterr().err
    assert "refused" in said and "plain text" not in said and "certificate" not in said
