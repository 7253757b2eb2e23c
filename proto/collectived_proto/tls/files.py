"""Certificates as files: read whole, checked against each other, and made into what TLS is spoken with.

A certificate is tried before it is used: a server and a client made of the same files meet in memory. Certificates that
the authority has not signed, that have expired or that do not fit their key are found there, with the words of OpenSSL.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from collectived_proto.private_files import PrivateFileError, read_private, read_public

VARIABLES = {"cert": "COLLECTIVED_TLS_CERT", "key": "COLLECTIVED_TLS_KEY", "ca": "COLLECTIVED_TLS_CA"}
FLAGS = {"cert": "--tls-cert", "key": "--tls-key", "ca": "--tls-ca"}

_UNTRUSTED_CODES = (18, 19, 20, 21)  # OpenSSL's verify codes for a chain that does not end at a trusted authority


class TlsFileError(ValueError):
    """Files with which TLS cannot be spoken: the text names the file, says why, and what to do."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where certificates lie.

    cert: the certificate of this process, with those between it and the authority's. key: its private key. ca:
    certificates of the authorities that others must show one of. Each is None where it is not named. origins: how each
    was named.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    origins: Mapping[str, str] = field(default_factory=lambda: FLAGS)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> TlsFiles:
        """Return the files that a caller's environment names."""
        named = {which: environment.get(variable) for which, variable in VARIABLES.items()}
        return cls(**{which: Path(name).expanduser() for which, name in named.items() if name}, origins=VARIABLES)

    def __bool__(self) -> bool:
        return any((self.cert, self.key, self.ca))

    def fingerprint(self) -> tuple[tuple[int, ...] | None, ...]:
        """Return a value that differs once any of the files has changed."""
        return tuple(_file_fingerprint(path) for path in (self.cert, self.key, self.ca))


@dataclass(frozen=True, slots=True)
class CertificateIdentity:
    """The names and addresses for which a certificate is valid, and until when."""

    names: tuple[str, ...]
    not_after: datetime


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """The content of the files at one moment, in PEM; empty where there is no such file.

    identity: of `cert`; None where there is none, or no authority by which it could be tried.
    """

    files: TlsFiles
    cert: bytes = b""
    key: bytes = b""
    ca: bytes = b""
    identity: CertificateIdentity | None = None

    @property
    def is_mutual(self) -> bool:
        """Whether both sides of a connection can prove their identity."""
        return bool(self.cert and self.ca)


def load_material(files: TlsFiles, serves: bool = False) -> TlsMaterial:
    """Read the files now. `serves`: whether the process serves with it, too, and does not only call with it.

    Raises:
        TlsFileError: one cannot be read, holds nothing of its kind, does not fit the others, or has expired; or
            every user may read the key.
    """
    _check_pair(files)
    key = _read(files, "key") if files.key else b""
    cert = _read(files, "cert") if files.cert else b""
    ca = _read(files, "ca") if files.ca else b""
    material = TlsMaterial(files, cert, key, ca)
    check_authorities(material)
    if not cert:
        return material
    server = server_context(material, demand=bool(ca))
    if not ca:
        return material
    client = client_context(material)
    client.check_hostname = False
    if not serves:  # a person's need not be good for that
        client.verify_mode = ssl.CERT_NONE
    try:
        return TlsMaterial(files, cert, key, ca, _parse_identity(_handshake_in_memory(server, client)))
    except ssl.SSLError as error:
        if not serves and getattr(error, "verify_code", 0) in _UNTRUSTED_CODES:  # perhaps the server's authority is
            return material
        raise TlsFileError(
            f"{files.origins['cert']} {files.cert} is refused by {files.origins['ca']} {files.ca}: "
            f"{_reason(error)}; renew "
            "it (`collectived certs renew`), or name the authority that has signed it"
        ) from None


def server_context(material: TlsMaterial, demand: bool) -> ssl.SSLContext:
    """The TLS context of a server. `demand`: whether callers must show a certificate of our authority."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.num_tickets = 0  # no client resumes, and a ticket that is never read would turn a close into a reset
    return _configure(made, material, demand)


def client_context(material: TlsMaterial) -> ssl.SSLContext:
    """The TLS context of a client; it checks names.

    Without an authority of the job, those of the system are trusted.
    """
    made = _configure(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), material, demand=True)
    if not material.ca:
        made.load_default_certs()
    return made


def check_authorities(material: TlsMaterial) -> None:
    """Raise TlsFileError where the file of authorities holds none."""
    if material.ca:
        _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), material)


def _configure(context: ssl.SSLContext, material: TlsMaterial, demand: bool) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED if demand else ssl.CERT_NONE
    if material.ca:
        _load_authorities(context, material)
    files = material.files
    if files.cert and files.key:
        try:
            context.load_cert_chain(files.cert, files.key, password=_no_password)
        except _EncryptedKey:
            raise TlsFileError(
                f"{files.origins['key']} {files.key}: is encrypted, and a daemon cannot ask for its password: "
                "store it without one, with mode 600"
            ) from None
        except (ssl.SSLError, OSError) as error:
            raise TlsFileError(
                f"{files.origins['cert']} {files.cert} with {files.origins['key']} {files.key}: "
                f"{_reason(error)}; expected a "
                "certificate in PEM and the key that it was made for"
            ) from None
    return context


def _load_authorities(context: ssl.SSLContext, material: TlsMaterial) -> None:
    try:
        context.load_verify_locations(cadata=material.ca.decode("ascii", errors="replace"))
    except (ssl.SSLError, ValueError) as error:
        raise TlsFileError(
            f"{material.files.origins['ca']} {material.files.ca}: {_reason(error)}; expected "
            f"certificates of authorities "
            "in PEM"
        ) from None


class _EncryptedKey(Exception):
    """A key that needs a password."""


def _no_password() -> str:
    raise _EncryptedKey


def _handshake_in_memory(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """Return what the server has seen of the client's certificate."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server.wrap_bio(there, back, server_side=True)
    calling = client.wrap_bio(back, there)
    for side in (calling, serving, calling, serving):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return dict(serving.getpeercert() or {})


def _parse_identity(seen: Mapping[str, Any]) -> CertificateIdentity:
    names = tuple(name for _, name in seen.get("subjectAltName", ()))
    return CertificateIdentity(names, datetime.fromtimestamp(ssl.cert_time_to_seconds(seen["notAfter"]), UTC))


def _reason(error: Exception) -> str:
    """Return OpenSSL's reason without what surrounds it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(getattr(error, "strerror", None) or error)


def _check_pair(files: TlsFiles) -> None:
    if bool(files.cert) == bool(files.key):
        return
    here, missing = ("cert", "key") if files.cert else ("key", "cert")
    raise TlsFileError(
        f"{files.origins[here]} is given and {files.origins[missing]} is not: a certificate and its key go together"
    )


def _read(files: TlsFiles, which: str) -> bytes:
    path: Path = getattr(files, which)
    try:
        return read_private(path).encode() if which == "key" else read_public(path)
    except PrivateFileError as error:
        raise TlsFileError(f"{files.origins[which]} {path}: {error}") from None


def _file_fingerprint(path: Path | None) -> tuple[int, ...] | None:
    try:
        found = path.stat() if path else None
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_size) if found else None
