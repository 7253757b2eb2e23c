"""The folder of an authority, as its files lie.

ca.crt              the authority's certificate: everybody may have it
authority/ca.key    its key: whoever has it can let anybody in, so it stays where certificates are made
NAME/               what one host or person needs: tls.crt, tls.key, ca.crt; to be copied there as it is
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from collectived_launcher.certs.authority import Authority, Certificate, Issued, Key, is_of, names_of
from collectived_proto.private_files import Unusable, read_private

AUTHORITY, CA, CA_KEY = "authority", "ca.crt", "ca.key"
CERT, KEY = "tls.crt", "tls.key"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Refused(Exception):
    """What was asked for cannot be done to this folder; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A certificate of the folder. `name`: of its subfolder, '' for the authority's own."""

    name: str
    certificate: Certificate
    ours: bool = True

    @property
    def names(self) -> list[str]:
        return names_of(self.certificate)

    @property
    def expires(self) -> datetime:
        return self.certificate.not_valid_after_utc

    def days_left(self, now: datetime) -> int:
        """Whole days; negative after its end."""
        return (self.expires - now).days

    def due(self, now: datetime) -> bool:
        """Whether less than a third of its time is left."""
        return self.expires - now < (self.expires - self.certificate.not_valid_before_utc) / 3


def begin(folder: Path, authority: Issued) -> None:
    """Makes a folder for a new authority.

    Raises:
        Refused: there is one already.
    """
    for path in (folder / CA, folder / AUTHORITY / CA_KEY):
        if path.exists():
            raise Refused(
                f"{path} is there already: what it has signed would be worthless under a new one; choose another "
                "folder, or remove it first if that is what you want"
            )
    with _as_written(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / AUTHORITY).mkdir(mode=0o700, exist_ok=True)
        _write(folder / AUTHORITY / CA_KEY, authority.key, 0o600)
        _write(folder / CA, authority.certificate, 0o644)


def authority(folder: Path) -> Authority:
    """Who signs here.

    Raises:
        Refused: nobody does, or its key can be read by everybody.
    """
    path = folder / AUTHORITY / CA_KEY
    if not (folder / CA).exists():
        raise Refused(f"{folder} has no authority ({CA}): make one with `collectived certs init --folder {folder}`")
    try:
        key = serialization.load_pem_private_key(read_private(path).encode(), None)
    except Unusable as error:
        raise Refused(f"{path}: {error}") from None
    except (ValueError, TypeError):
        raise Refused(f"{path} is no private key in PEM") from None
    if not isinstance(key, Key):
        raise Refused(f"{path} is no ECDSA key: expected the one that `collectived certs init` made")
    return Authority(_certificate(folder / CA), key)


def check_free(folder: Path, name: str) -> None:
    """
    Raises:
        Refused: no folder can have this name, or one has; or nobody signs here.
    """
    authority(folder)
    if not _NAME.fullmatch(name) or name in (AUTHORITY, CA):
        raise Refused(f"{name!r} is no name for a folder: expected at most 64 letters, digits, dots, - and _")
    if (folder / name).exists():
        raise Refused(f"{folder / name} is there already: `collectived certs renew {name}`, or remove it first")


def put(folder: Path, name: str, issued: Issued) -> Path:
    """Writes what a host or a person needs; where."""
    place = folder / name
    with _as_written(place):
        place.mkdir(mode=0o700)
        _write(place / KEY, issued.key, 0o600)
        _write(place / CERT, issued.certificate, 0o644)
        _write(place / CA, (folder / CA).read_bytes(), 0o644)
    return place


def put_again(folder: Path, name: str, certificate: bytes) -> None:
    """A new certificate for a key that is there: one file changes, so that nobody ever sees two that do not fit."""
    with _as_written(folder / name):
        _write(folder / name / CERT, certificate, 0o644)


def entries(folder: Path) -> list[Entry]:
    """What the folder has: the authority's first, then the others by name.

    Raises:
        Refused: there is no authority, or a file is no certificate.
    """
    if not (folder / CA).exists():
        raise Refused(f"{folder} has no authority ({CA}): make one with `collectived certs init --folder {folder}`")
    own = _certificate(folder / CA)
    issued = ((path.parent.name, _certificate(path)) for path in sorted(folder.glob(f"*/{CERT}")))
    return [Entry("", own), *(Entry(name, found, is_of(found, own)) for name, found in issued)]


def _certificate(path: Path) -> Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise Refused(f"{path} is no certificate in PEM") from None


def _write(path: Path, content: bytes, mode: int) -> None:
    """Whole or not at all, and never readable for others for a moment."""
    draft = path.with_name(f"{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(draft, path)


@contextlib.contextmanager
def _as_written(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Refused(f"{place} cannot be written: {error.strerror}") from None
