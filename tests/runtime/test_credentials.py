"""What callers may do by what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from collectived_proto.viewing import viewing_token
from collectived_runtime.credentials import Gate, Right, gate, read_token
from collectived_runtime.daemon import CannotStart

SECRET, TOKEN = "s3cret", "0123456789abcdef"


@pytest.mark.parametrize("shown", ["Bearer s3cret", "bearer s3cret", "Bearer  s3cret "])
def test_the_secret_is_good_for_everything(shown: str) -> None:
    assert Gate(SECRET, token=TOKEN).right(shown) is Right.ALL


@pytest.mark.parametrize("token", [viewing_token(SECRET), TOKEN])
def test_viewing_tokens_are_good_for_looking(token: str) -> None:
    assert Gate(SECRET, token=TOKEN).right(f"Bearer {token}") is Right.LOOK


@pytest.mark.parametrize(
    "shown",
    ["", "Bearer", "Bearer ", "Bearer wrong", "s3cret", "Basic s3cret", "Bearer s3cretx", "Bearer ä", "Bearer \ud800"],
)
def test_nothing_else_is_good_for_anything(shown: str) -> None:
    for one in (Gate(SECRET), Gate(SECRET, token=TOKEN), Gate(token=TOKEN), Gate()):
        assert one.right(shown) is Right.NOTHING


def test_where_there_is_no_secret_its_token_is_nobodys() -> None:
    assert Gate().right(f"Bearer {viewing_token('')}") is Right.NOTHING
    assert not Gate().admits_somebody
    assert Gate(token=TOKEN).admits_somebody and Gate(SECRET).admits_somebody and Gate(insecure=True).admits_somebody


def test_insecure_asks_nobody() -> None:
    assert Gate(SECRET, insecure=True).right("") is Right.ALL


def test_who_is_turned_away_is_counted_by_what_was_shown() -> None:
    one = Gate(SECRET)
    one.turned_away("http", "")
    one.turned_away("grpc", "Bearer wrong")
    one.turned_away("grpc", f"Bearer {viewing_token(SECRET)}")
    assert one.refused == {("http", "nothing"): 1, ("grpc", "wrong"): 1, ("grpc", "viewing"): 1}


def test_the_token_does_not_tell_the_secret() -> None:
    assert re.fullmatch("[0-9a-f]{32}", viewing_token(SECRET))
    assert viewing_token("s3cret") != viewing_token("s3cres") and viewing_token("") == ""


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_token_is_read_from_a_file_that_others_cannot_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(mode)
    assert gate("", False, path).right(f"Bearer {TOKEN}") is Right.LOOK


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o601])
def test_one_that_others_get_at_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    with pytest.raises(CannotStart, match=rf"--viewing-token-file {path}: has mode 0{mode:o}, .*chmod 600"):
        read_token(path)


@pytest.mark.parametrize("text", ["", "\n", "short", "two words of some length", "ä" * 20, "0123456789abcdef\nanother"])
def test_one_without_a_token_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(CannotStart, match="expected one line of at least 16 printable ASCII") as refused:
        read_token(path)
    assert not text.strip() or text.strip() not in str(refused.value)


def test_one_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="cannot be read: No such file"):
        read_token(tmp_path / "token")
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff" * 20)
    path.chmod(0o600)
    with pytest.raises(CannotStart, match="cannot be read: it is no text"):
        read_token(path)
