"""The folder of an authority, as its files lie.

ca.crt              the authority's certificate: every user may have it
authority/ca.key    its key: it can admit any host or person, so it stays where certificates are made
NAME/               the files of one host or person: tls.crt, tls.key, ca.crt; to be copied there as it is
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from collectived_launcher.certs.authority import (
    Authority,
    Certificate,
    IssuedCertificate,
    PrivateKey,
    get_names,
    is_issued_by,
)
from collectived_proto.private_files import PrivateFileError, read_private, write_atomically

AUTHORITY, CA, CA_KEY = "authority", "ca.crt", "ca.key"
CERT, KEY = "tls.crt", "tls.key"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class CertificateFolderError(Exception):
    """An operation cannot be done to this folder; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class CertificateEntry:
    """A certificate of the folder. `name`: of its subfolder, '' for the authority's own."""

    name: str
    certificate: Certificate
    is_ours: bool = True

    @property
    def names(self) -> list[str]:
        return get_names(self.certificate)

    @property
    def expires(self) -> datetime:
        return self.certificate.not_valid_after_utc

    def days_left(self, now: datetime) -> int:
        """Whole days; negative after its end."""
        return (self.expires - now).days

    def is_due(self, now: datetime) -> bool:
        """Whether less than a third of its time is left."""
        return self.expires - now < (self.expires - self.certificate.not_valid_before_utc) / 3


def create_authority_folder(folder: Path, authority: IssuedCertificate) -> None:
    """Makes a folder for a new authority.

    Raises:
        CertificateFolderError: there is one already.
    """
    for path in (folder / CA, folder / AUTHORITY / CA_KEY):
        if path.exists():
            raise CertificateFolderError(
                f"{path} is there already: what it has signed would be worthless under a new one; choose another "
                "folder, or remove it first if that is what you want"
            )
    with _translate_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / AUTHORITY).mkdir(mode=0o700, exist_ok=True)
        write_atomically(folder / AUTHORITY / CA_KEY, authority.key, 0o600)
        write_atomically(folder / CA, authority.certificate, 0o644)


def load_authority(folder: Path) -> Authority:
    """Load the authority that signs in this folder.

    Raises:
        CertificateFolderError: there is none, or other users can read its key.
    """
    path = folder / AUTHORITY / CA_KEY
    _check_authority(folder)
    try:
        key = serialization.load_pem_private_key(read_private(path).encode(), None)
    except PrivateFileError as error:
        raise CertificateFolderError(f"{path}: {error}") from None
    except (ValueError, TypeError):
        raise CertificateFolderError(f"{path} is no private key in PEM") from None
    if not isinstance(key, PrivateKey):
        raise CertificateFolderError(f"{path} is no ECDSA key: expected the one that `collectived certs init` made")
    return Authority(_load_certificate(folder / CA), key)


def _check_authority(folder: Path) -> None:
    if not (folder / CA).exists():
        raise CertificateFolderError(
            f"{folder} has no authority ({CA}): make one with `collectived certs init --folder {folder}`"
        )


def check_free(folder: Path, name: str) -> None:
    """
    Raises:
        CertificateFolderError: no folder can have this name, or one has; or there is no authority.
    """
    load_authority(folder)
    if not _NAME.fullmatch(name) or name in (AUTHORITY, CA):
        raise CertificateFolderError(
            f"{name!r} is no name for a folder: expected at most 64 letters, digits, dots, - and _"
        )
    if (folder / name).exists():
        raise CertificateFolderError(
            f"{folder / name} is there already: `collectived certs renew {name}`, or remove it first"
        )


def write_issued(folder: Path, name: str, issued: IssuedCertificate) -> Path:
    """Writes what a host or a person needs; where."""
    place = folder / name
    with _translate_write_errors(place):
        place.mkdir(mode=0o700)
        write_atomically(place / KEY, issued.key, 0o600)
        write_atomically(place / CERT, issued.certificate, 0o644)
        write_atomically(place / CA, (folder / CA).read_bytes(), 0o644)
    return place


def replace_certificate(folder: Path, name: str, certificate: bytes) -> None:
    """Write a new certificate for a key that is there. One file changes, so readers always see two that fit."""
    with _translate_write_errors(folder / name):
        write_atomically(folder / name / CERT, certificate, 0o644)


def list_entries(folder: Path) -> list[CertificateEntry]:
    """List the certificates of the folder: the authority's first, then the others by name.

    Raises:
        CertificateFolderError: there is no authority, or a file is no certificate.
    """
    _check_authority(folder)
    own = _load_certificate(folder / CA)
    issued = ((path.parent.name, _load_certificate(path)) for path in sorted(folder.glob(f"*/{CERT}")))
    return [
        CertificateEntry("", own),
        *(CertificateEntry(name, found, is_issued_by(found, own)) for name, found in issued),
    ]


def _load_certificate(path: Path) -> Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise CertificateFolderError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise CertificateFolderError(f"{path} is no certificate in PEM") from None


@contextlib.contextmanager
def _translate_write_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CertificateFolderError(f"{place} cannot be written: {error.strerror}") from None
