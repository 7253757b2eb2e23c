"""Files that hold a secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from collectived_proto.private_files import (
    ExposedFileError,
    PrivateFileError,
    read_credential,
    read_private,
    write_atomically,
)


def write(path: Path, mode: int = 0o600) -> Path:
    path.write_text("s3cret\n")
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o400])
def test_what_others_cannot_read_is_read(tmp_path: Path, mode: int) -> None:
    assert read_private(write(tmp_path / "secret", mode)) == "s3cret\n"


def test_a_link_is_followed(tmp_path: Path) -> None:
    """Kubernetes mounts secrets as links."""
    (tmp_path / "link").symlink_to(write(tmp_path / "secret"))
    assert read_private(tmp_path / "link") == "s3cret\n"


def test_what_everybody_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExposedFileError, match="has mode 0644"):
        read_private(write(tmp_path / "secret", 0o644))


@pytest.mark.timeout(20)
def test_a_fifo_into_which_nobody_writes_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "secret", 0o600)
    with pytest.raises(PrivateFileError, match="is no regular file"):
        read_private(tmp_path / "secret")


@pytest.mark.parametrize(
    ("name", "why"), [("none", "cannot be read: No such file"), (".", "cannot be read: Is a directory")]
)
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(PrivateFileError, match=why):
        read_private(tmp_path / name)


@pytest.mark.parametrize("text", ["", "\n", "two\nlines", "Ж", "\x07"])
def test_a_file_that_holds_no_credential_is_refused_even_where_none_is_needed(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "secret")
    assert read_credential(path) == "s3cret"
    path.write_text(text)
    for needed in (True, False):
        with pytest.raises(PrivateFileError, match="holds no secret or token: expected one line of printable ASCII"):
            read_credential(path, needed)


def test_a_credential_that_is_not_needed_may_be_out_of_reach_but_not_exposed(tmp_path: Path) -> None:
    assert read_credential(tmp_path / "none", needed=False) == ""
    with pytest.raises(PrivateFileError, match="cannot be read"):
        read_credential(tmp_path / "none")
    with pytest.raises(ExposedFileError):
        read_credential(write(tmp_path / "secret", 0o644), needed=False)


def test_a_file_is_written_whole_over_what_a_killed_writer_left(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write(tmp_path / "secret.new", 0o666)
    for content in ("first", b"second"):
        write_atomically(path, content, sync=True)
    assert path.read_text() == "second" and path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "folder", "text")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
