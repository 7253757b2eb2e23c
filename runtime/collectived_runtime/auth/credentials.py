"""Credentials of callers, and the permissions that they give.

The job's *secret* lets it do everything. A *client token* lets it use workers: open sessions, join groups, look; each
has a name, by which rules can speak of it. A *viewing token* lets it look and nothing else: the one that is made from
the secret (`collectived_proto.viewing_token`), or one of a file. All are shown as `authorization: Bearer …`, over gRPC
and HTTP.
"""

from __future__ import annotations

import enum
import hmac
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Literal

from collectived_proto.config.daemons import DaemonSettings
from collectived_proto.private_files import PrivateFileError, read_private
from collectived_proto.viewing_token import viewing_token
from collectived_runtime.limits.login_throttle import LoginThrottle
from collectived_runtime.startup_error import StartupError

SHORTEST_TOKEN = 16  # characters
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOKEN_HINT = f"at least {SHORTEST_TOKEN} printable ASCII characters without spaces, such as `openssl rand -hex 16`"

log = logging.getLogger("collectived.credentials")

Surface = Literal["grpc", "http"]
RejectReason = Literal["nothing", "wrong", "viewing"]
SURFACES: tuple[Surface, ...] = ("grpc", "http")
REJECT_REASONS: tuple[RejectReason, ...] = ("nothing", "wrong", "viewing")


class AccessLevel(enum.IntEnum):
    """The permissions of a caller."""

    NONE = 0
    VIEW = 1
    USE = 2
    ALL = 3


@dataclass(frozen=True, slots=True)
class Credential:
    """Something that is good for something; kept as a digest. `name`: of a client token; until: seconds since 1970."""

    digest: bytes
    access: AccessLevel
    name: str = ""
    expires_at: float = math.inf


_NO_CREDENTIAL = Credential(b"", AccessLevel.NONE)


class TokenAuthenticator:
    """Finds the permissions of callers by their credentials, and counts rejected callers.

    Args:
        secret: the job's; empty: there is none.
        insecure: every caller may do everything.
        token: a viewing token beside the one that is made from the secret; empty: there is none.
        files: further credentials, which may change.
        logins: the addresses that have shown wrong credentials too often.
    """

    def __init__(
        self,
        secret: str = "",
        insecure: bool = False,
        token: str = "",
        files: Sequence[CredentialFile] = (),
        logins: LoginThrottle | None = None,
    ) -> None:
        self.insecure = insecure
        self.login_throttle = LoginThrottle(0) if logins is None else logins
        self.reject_counts: Counter[tuple[Surface, RejectReason]] = Counter()
        """How many were turned away: where, and whether they showed nothing, something wrong, or a token for what it is
        not good for."""
        known = ((secret, AccessLevel.ALL), (viewing_token(secret), AccessLevel.VIEW), (token, AccessLevel.VIEW))
        self._static_credentials = [Credential(_digest(text), right) for text, right in known if text]
        self._credential_files = files

    @property
    def can_admit_anyone(self) -> bool:
        return self.insecure or bool(self._static_credentials) or bool(self._credential_files)

    def authenticate(self, authorization: str) -> Credential:
        """Look up a credential: the value of the header, or ''. Takes the same time for all values."""
        scheme, _, text = authorization.partition(" ")
        given = _digest(text.strip() if scheme.lower() == "bearer" else "")
        best = _NO_CREDENTIAL
        for one in (
            *self._static_credentials,
            *(credential for file in self._credential_files for credential in file.credentials()),
        ):
            if hmac.compare_digest(given, one.digest) and one.expires_at > time.time() and one.access > best.access:
                best = one
        return Credential(best.digest, AccessLevel.ALL, best.name) if self.insecure else best

    def get_access_level(self, authorization: str) -> AccessLevel:
        """The permissions of a caller with this credential."""
        return self.authenticate(authorization).access

    def count_rejection(self, door: Surface, authorization: str, address: str = "") -> None:
        """Count a refused call of a caller at an address."""
        reason: RejectReason = (
            "nothing" if not authorization else "viewing" if self.get_access_level(authorization) else "wrong"
        )
        self.reject_counts[door, reason] += 1
        if reason == "wrong":
            self.login_throttle.record_failure(address)


class CredentialFile:
    """A file of credentials, read again when it changes; one that is broken then is logged, and changes nothing.

    Raises:
        StartupError: it cannot be used.
    """

    def __init__(self, path: Path, read: Callable[[Path], Sequence[Credential]]) -> None:
        self._path, self._read = path, read
        self._file_version = self._get_file_version()
        self._credentials = read(path)

    def credentials(self) -> Sequence[Credential]:
        """Those of the file as it is now."""
        seen = self._get_file_version()
        if seen != self._file_version:
            self._file_version = seen
            try:
                self._credentials = self._read(self._path)
            except StartupError as error:
                log.warning("%s; its former content stays valid until that is mended", error)
            else:
                log.warning("%s has changed and was read again", self._path)
        return self._credentials

    def _get_file_version(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def create_authenticator(settings: DaemonSettings) -> TokenAuthenticator:
    """The gate of a daemon.

    Raises:
        StartupError: a file cannot be used.
    """
    if settings.insecure:
        log.warning("--insecure: any process that can connect to this daemon may do all; give it a secret instead")
    named = (
        (settings.viewing_token_file, _read_viewing_credentials),
        (settings.client_tokens_file, read_client_tokens),
    )
    files = [CredentialFile(path, read) for path, read in named if path]
    return TokenAuthenticator(settings.secret, settings.insecure, "", files, LoginThrottle(settings.max_login_failures))


def read_viewing_token(path: Path) -> str:
    """The viewing token that a file holds: one line.

    Raises:
        StartupError: it cannot be read, others may read it, or it holds no such line.
    """
    text = _read_private_text(path, "--viewing-token-file").strip()
    if not _is_token(text):
        raise StartupError(f"--viewing-token-file {path}: holds no token: expected one line of {_TOKEN_HINT} makes")
    return text


def _read_viewing_credentials(path: Path) -> Sequence[Credential]:
    return [Credential(_digest(read_viewing_token(path)), AccessLevel.VIEW)]


def read_client_tokens(path: Path) -> Sequence[Credential]:
    """The client tokens that a file holds: lines of `NAME TOKEN` or `NAME TOKEN UNTIL`; empty lines and those that
    begin with # say nothing.

    Raises:
        StartupError: it cannot be read, others may read it, or a line is none of these. No line is quoted.
    """
    found: list[Credential] = []
    for number, line in enumerate(_read_private_text(path, "--client-tokens-file").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        here = f"--client-tokens-file {path}: line {number}"
        if len(words) not in (2, 3) or not _NAME.fullmatch(words[0]) or not _is_token(words[1]):
            raise StartupError(
                f"{here} is no NAME TOKEN [UNTIL]: expected a name of letters, digits, '.', '_' and '-', and a token "
                f"of {_TOKEN_HINT} makes"
            )
        digest = _digest(words[1])
        if any(known.digest == digest and known.name != words[0] for known in found):
            raise StartupError(f"{here} gives a second name to a token: each token needs one")
        found.append(
            Credential(digest, AccessLevel.USE, words[0], _parse_expiry(words[2], here) if words[2:] else math.inf)
        )
    return found


def _parse_expiry(text: str, here: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise StartupError(
            f"{here}: {text!r} is no time until which a token is good: expected such as 2027-01-31 or "
            "2027-01-31T18:00+01:00"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _read_private_text(path: Path, option: str) -> str:
    try:
        return read_private(path)
    except PrivateFileError as error:
        raise StartupError(f"{option} {path}: {error}") from None


def _is_token(text: str) -> bool:
    return len(text) >= SHORTEST_TOKEN and text.isascii() and text.isprintable() and " " not in text


def _digest(text: str) -> bytes:
    """Of one length, so that the time to compare does not show the length either."""
    return sha256(text.encode(errors="replace")).digest()
