"""A link that is to be dialled, and the error where it cannot be had: whether its peer is lost, or no peer is."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from collectived_runtime.transport.hello import HelloRefused, LinkHello
from collectived_runtime.transport.link import Link, LinkBroken, LinkRefused, PeerAddress
from collectived_runtime.transport.listener import format_address

DIAL_SECONDS = 5.0
# No process listens there, or no packet comes through. All other errors are of this host, or of a peer that is there.
_UNREACHABLE = {
    errno.ECONNREFUSED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ETIMEDOUT,
}
_HUNG_UP = {errno.ECONNABORTED, errno.ECONNRESET, errno.EPIPE}


@dataclass(slots=True)
class DialRequest:
    """A link to be dialled. Exactly one of the two is called, in the connection server's thread.

    `incarnation` is the peer's; "": a connection that was kept will not do.
    """

    address: tuple[str, int]
    hello: LinkHello
    on_link: Callable[[Link], None]
    on_failure: Callable[[LinkBroken], None]
    deadline: float = field(default_factory=lambda: time.monotonic() + DIAL_SECONDS)
    not_before: float = 0.0
    resolved_address: tuple[str, int] | None = None  # the address of the host's name
    incarnation: str = ""
    skip_pool: bool = False  # a kept connection has failed

    @property
    def peer_address(self) -> PeerAddress:
        return PeerAddress(self.hello.acceptor, self.incarnation, self.address)

    def fail(self, why: Exception | str) -> None:
        """Report to the caller that there will be no link. `why`: an error of the handshake, or of this host."""
        self.on_failure(_describe_failure(why, format_address(*self.address), self.hello.acceptor))


def _describe_failure(why: Exception | str, where: str, peer: int) -> LinkBroken:
    """Only a peer that does not listen, or does not answer, may be lost: one that refuses is there."""
    code = why.errno if isinstance(why, OSError) else None
    reason = (why.strerror if isinstance(why, OSError) else None) or why
    if isinstance(why, TimeoutError) or code in _UNREACHABLE:
        return LinkBroken(f"it cannot be reached: {where}: {reason}", peer)
    if isinstance(why, HelloRefused) or code in _HUNG_UP:
        return LinkRefused(f"no handshake with {where}: {reason}", peer)
    return LinkRefused(f"{where} cannot be dialled from there: {reason}", peer)
