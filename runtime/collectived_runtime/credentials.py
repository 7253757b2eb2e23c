"""What a caller shows, and what that lets it do.

The job's *secret* lets it do everything. A *viewing token* lets it look and nothing else: the one that is made from the
secret (`collectived_proto.viewing`), or one of a file. Both are shown as `authorization: Bearer …`, over gRPC and HTTP.
"""

from __future__ import annotations

import enum
import hmac
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Literal

from collectived_proto.private_files import Unusable, read_private
from collectived_proto.viewing import viewing_token
from collectived_runtime.daemon import CannotStart
from collectived_runtime.limits.logins import Logins

SHORTEST_TOKEN = 16  # characters

Door = Literal["grpc", "http"]
Why = Literal["nothing", "wrong", "viewing"]
DOORS: tuple[Door, ...] = ("grpc", "http")
WHYS: tuple[Why, ...] = ("nothing", "wrong", "viewing")


class Right(enum.IntEnum):
    """What a caller may do."""

    NOTHING = 0
    LOOK = 1
    ALL = 2


class Gate:
    """Tells what callers may do by what they show, and counts those who were turned away.

    Args:
        secret: the job's; empty: nobody knows it.
        insecure: everybody may do everything.
        token: a viewing token beside the one that is made from the secret; empty: there is none.
        logins: who has shown something wrong too often.
    """

    def __init__(self, secret: str = "", insecure: bool = False, token: str = "", logins: Logins | None = None) -> None:
        self.insecure = insecure
        self.logins = Logins(0) if logins is None else logins
        self.refused: Counter[tuple[Door, Why]] = Counter()
        """How many were turned away: where, and whether they showed nothing, something wrong, or a viewing token for
        what it is not good for."""
        known = ((secret, Right.ALL), (viewing_token(secret), Right.LOOK), (token, Right.LOOK))
        self._known = [(_digest(credential), right) for credential, right in known if credential]

    @property
    def admits_somebody(self) -> bool:
        return self.insecure or bool(self._known)

    def right(self, authorization: str) -> Right:
        """Of whoever shows this: the value of the header, or ''. Takes the same time whatever is shown."""
        scheme, _, shown = authorization.partition(" ")
        given = _digest(shown.strip() if scheme.lower() == "bearer" else "")
        found = [right if hmac.compare_digest(given, known) else Right.NOTHING for known, right in self._known]
        return Right.ALL if self.insecure else max(found, default=Right.NOTHING)

    def turned_away(self, door: Door, authorization: str, address: str = "") -> None:
        """Counts a caller, at an address, to whom what it asked for was refused."""
        why: Why = "nothing" if not authorization else "viewing" if self.right(authorization) else "wrong"
        self.refused[door, why] += 1
        if why == "wrong":
            self.logins.failed(address)


def gate(secret: str, insecure: bool, token_file: Path | None, most_failures: int = 0) -> Gate:
    """The gate of a daemon.

    Raises:
        CannotStart: the file cannot be used.
    """
    return Gate(secret, insecure, read_token(token_file) if token_file else "", Logins(most_failures))


def read_token(path: Path) -> str:
    """The viewing token that a file holds: one line.

    Raises:
        CannotStart: it cannot be read, others may read it, or it holds no such line.
    """
    try:
        text = read_private(path).strip()
    except Unusable as error:
        raise CannotStart(f"--viewing-token-file {path}: {error}") from None
    if len(text) < SHORTEST_TOKEN or not text.isascii() or not text.isprintable() or " " in text:
        raise CannotStart(
            f"--viewing-token-file {path}: holds no token: expected one line of at least {SHORTEST_TOKEN} printable "
            "ASCII characters without spaces, such as `openssl rand -hex 16` makes"
        )
    return text


def _digest(text: str) -> bytes:
    """Of one length, so that comparing does not tell the length either."""
    return sha256(text.encode(errors="replace")).digest()
