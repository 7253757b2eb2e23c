"""What callers may do by what they show."""

from __future__ import annotations

import hmac
import logging
import re
from pathlib import Path

import pytest

from collectived_proto.config.daemons import DaemonSettings
from collectived_proto.viewing_token import viewing_token
from collectived_runtime.auth import credentials
from collectived_runtime.auth.credentials import (
    AccessLevel,
    TokenAuthenticator,
    create_authenticator,
    read_client_tokens,
    read_viewing_token,
)
from collectived_runtime.startup_error import StartupError

SECRET, TOKEN = "s3cret", "0123456789abcdef"


@pytest.mark.parametrize("shown", ["Bearer s3cret", "bearer s3cret", "Bearer  s3cret "])
def test_the_secret_is_good_for_everything(shown: str) -> None:
    assert TokenAuthenticator(SECRET, token=TOKEN).get_access_level(shown) is AccessLevel.ALL


@pytest.mark.parametrize("token", [viewing_token(SECRET), TOKEN])
def test_viewing_tokens_are_good_for_looking(token: str) -> None:
    assert TokenAuthenticator(SECRET, token=TOKEN).get_access_level(f"Bearer {token}") is AccessLevel.VIEW


@pytest.mark.parametrize(
    "shown",
    ["", "Bearer", "Bearer ", "Bearer wrong", "s3cret", "Basic s3cret", "Bearer s3cretx", "Bearer ä", "Bearer \ud800"],
)
def test_nothing_else_is_good_for_anything(shown: str) -> None:
    for one in (
        TokenAuthenticator(SECRET),
        TokenAuthenticator(SECRET, token=TOKEN),
        TokenAuthenticator(token=TOKEN),
        TokenAuthenticator(),
    ):
        assert one.get_access_level(shown) is AccessLevel.NONE


def test_where_there_is_no_secret_its_token_is_nobodys() -> None:
    assert TokenAuthenticator().get_access_level(f"Bearer {viewing_token('')}") is AccessLevel.NONE
    assert not TokenAuthenticator().can_admit_anyone
    assert (
        TokenAuthenticator(token=TOKEN).can_admit_anyone
        and TokenAuthenticator(SECRET).can_admit_anyone
        and TokenAuthenticator(insecure=True).can_admit_anyone
    )


def test_insecure_asks_nobody() -> None:
    assert TokenAuthenticator(SECRET, insecure=True).get_access_level("") is AccessLevel.ALL


def test_who_is_turned_away_is_counted_by_what_was_shown() -> None:
    one = TokenAuthenticator(SECRET)
    one.count_rejection("http", "")
    one.count_rejection("grpc", "Bearer wrong")
    one.count_rejection("grpc", f"Bearer {viewing_token(SECRET)}")
    assert one.reject_counts == {("http", "nothing"): 1, ("grpc", "wrong"): 1, ("grpc", "viewing"): 1}


def test_the_token_does_not_tell_the_secret() -> None:
    assert re.fullmatch("[0-9a-f]{32}", viewing_token(SECRET))
    assert viewing_token("s3cret") != viewing_token("s3cres") and viewing_token("") == ""


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_token_is_read_from_a_file_that_others_cannot_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(mode)
    assert (
        create_authenticator(DaemonSettings(viewing_token_file=path)).get_access_level(f"Bearer {TOKEN}")
        is AccessLevel.VIEW
    )


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o601])
def test_one_that_others_get_at_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    with pytest.raises(StartupError, match=rf"--viewing-token-file {path}: has mode 0{mode:o}, .*chmod 600"):
        read_viewing_token(path)


@pytest.mark.parametrize("text", ["", "\n", "short", "two words of some length", "ä" * 20, "0123456789abcdef\nanother"])
def test_one_without_a_token_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(StartupError, match="expected one line of at least 16 printable ASCII") as refused:
        read_viewing_token(path)
    assert not text.strip() or text.strip() not in str(refused.value)


def test_one_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        read_viewing_token(tmp_path / "token")
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff" * 20)
    path.chmod(0o600)
    with pytest.raises(StartupError, match="cannot be read: it is no text"):
        read_viewing_token(path)


CI, ANN = "c" * 16, "a" * 16


def private(path: Path, text: str) -> Path:
    """A file that others cannot read, put in place whole."""
    draft = path.with_name("draft")
    draft.write_text(text)
    draft.chmod(0o600)
    draft.replace(path)
    return path


def test_client_tokens_are_good_for_using_workers_and_have_a_name(tmp_path: Path) -> None:
    one = create_authenticator(
        DaemonSettings(
            secret="s3cret",
            client_tokens_file=private(tmp_path / "tokens", f"# who\n\nci {CI}\nann {ANN} 2999-01-31\n"),
        )
    )
    for name, token in (("ci", CI), ("ann", ANN)):
        found = one.authenticate(f"Bearer {token}")
        assert (found.access, found.name) == (AccessLevel.USE, name)
    assert (
        one.get_access_level("Bearer s3cret") is AccessLevel.ALL
        and one.get_access_level("Bearer ci") is AccessLevel.NONE
    )


@pytest.mark.parametrize("until", ["2001-01-31", "2001-01-31T18:00+01:00"])
def test_a_client_token_that_has_expired_is_good_for_nothing(tmp_path: Path, until: str) -> None:
    one = create_authenticator(
        DaemonSettings(secret="s3cret", client_tokens_file=private(tmp_path / "tokens", f"ci {CI} {until}\n"))
    )
    assert one.get_access_level(f"Bearer {CI}") is AccessLevel.NONE


@pytest.mark.parametrize(
    "line",
    ["ci", f"ci {CI} 2027-01-31 more", "ci short", f"ci/cd {CI}", f"ci {CI} tomorrow", f"{CI} ci", f"ci {'ä' * 16}"],
)
def test_a_line_that_is_no_client_token_is_refused_by_its_number_and_not_quoted(tmp_path: Path, line: str) -> None:
    path = private(tmp_path / "tokens", f"# one\n{line}\n")
    with pytest.raises(StartupError, match="line 2.*expected") as refused:
        read_client_tokens(path)
    assert CI not in str(refused.value)


def test_a_token_with_two_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="line 2 gives a second name to a token"):
        read_client_tokens(private(tmp_path / "tokens", f"ci {CI}\nann {CI}\n"))


def test_a_file_of_client_tokens_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = private(tmp_path / "tokens", f"ci {CI}\n")
    path.chmod(0o644)
    with pytest.raises(StartupError, match=f"--client-tokens-file {path}: has mode 0644"):
        create_authenticator(DaemonSettings(client_tokens_file=path))


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    viewing, clients = private(tmp_path / "viewing", TOKEN), private(tmp_path / "tokens", f"ci {CI}\n")
    one = create_authenticator(DaemonSettings(viewing_token_file=viewing, client_tokens_file=clients))
    private(viewing, "f" * 16)
    private(clients, f"ann {ANN}\n")
    assert (
        one.get_access_level(f"Bearer {'f' * 16}") is AccessLevel.VIEW
        and one.authenticate(f"Bearer {ANN}").name == "ann"
    )
    assert (
        one.get_access_level(f"Bearer {TOKEN}") is AccessLevel.NONE
        and one.get_access_level(f"Bearer {CI}") is AccessLevel.NONE
    )


@pytest.mark.parametrize("broken", ["short", "gone", "open"])
def test_a_file_that_is_broken_by_a_change_is_logged_once_and_the_old_token_stays(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = private(tmp_path / "viewing", TOKEN)
    one = create_authenticator(DaemonSettings(viewing_token_file=path))
    with caplog.at_level(logging.WARNING, "collectived.credentials"):
        if broken == "short":
            private(path, "short")
        elif broken == "gone":
            path.unlink()
        else:
            private(path, "e" * 16).chmod(0o644)
        for _ in range(3):
            assert one.get_access_level(f"Bearer {TOKEN}") is AccessLevel.VIEW
        (record,) = caplog.records
        assert "its former content stays valid until that is mended" in record.message
        private(path, "f" * 16)
        assert (
            one.get_access_level(f"Bearer {'f' * 16}") is AccessLevel.VIEW
            and one.get_access_level(f"Bearer {TOKEN}") is AccessLevel.NONE
        )
    assert TOKEN not in caplog.text and "f" * 16 not in caplog.text and "e" * 16 not in caplog.text


@pytest.mark.parametrize(
    "shown", ["", "Bearer", "Bearer x", f"Bearer {CI}", f"Bearer {TOKEN}", "Bearer s3cret", "Basic x"]
)
def test_whatever_is_shown_is_compared_with_everything_known(
    tmp_path: Path, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = create_authenticator(
        DaemonSettings(
            secret="s3cret",
            viewing_token_file=private(tmp_path / "v", TOKEN),
            client_tokens_file=private(tmp_path / "t", f"ci {CI}\nann {ANN} 2001-01-01\n"),
        )
    )
    compared: list[tuple[bytes, bytes]] = []

    class Watched:
        @staticmethod
        def compare_digest(given: bytes, known: bytes) -> bool:
            compared.append((given, known))
            return hmac.compare_digest(given, known)

    monkeypatch.setattr(credentials, "hmac", Watched)
    one.get_access_level(shown)
    # The secret, its viewing token, that of the file, and both client tokens; always of one length.
    assert len(compared) == 5 and {len(part) for pair in compared for part in pair} == {32}
