"""The permissions of a caller: by the credential that it shows, and at a Unix socket by its uid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from collectived_runtime.auth.credentials import AccessLevel, TokenAuthenticator
from collectived_runtime.auth.peers import UnixPeer, explain_denial
from collectived_runtime.auth.unix_proxy import PeerCredentialProxy
from collectived_runtime.limits.login_throttle import parse_peer_address
from collectived_runtime.limits.rejections import format_uid_key

_METADATA_KEY = "authorization"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of an RPC.

    access: what it may do. token_name: the name of the client token that it showed, ''; local: its user and process,
    where it came by a Unix socket.
    """

    access: AccessLevel
    token_name: str = ""
    unix_peer: UnixPeer | None = None

    @property
    def rejection_message(self) -> str:
        """The error for a caller that may do nothing."""
        if self.unix_peer is not None:
            return explain_denial(self.unix_peer)
        return (
            "this address needs the job's secret as metadata 'authorization: Bearer <secret>', and the call brought "
            "none or another: use the worker's Unix socket, or the secret of the job's file"
        )


class CallerIdentifier:
    """Finds the caller of an RPC.

    Args:
        gate: checks credentials.
        proxy: knows the callers at the daemon's Unix sockets.
        mutual: over TCP gRPC admits only callers with a certificate, which is as good as the secret.
    """

    def __init__(self, gate: TokenAuthenticator, proxy: PeerCredentialProxy, mutual: bool = False) -> None:
        self.authenticator = gate
        self._proxy = proxy
        self._is_mutual_tls = mutual

    def get_throttle_key(self, context: Any) -> str:
        """The key by which calls are counted: the user at a Unix socket, else the address; '' without either."""
        met = self._proxy.find_peer(context.peer())
        return parse_peer_address(context.peer()) if met is None else format_uid_key(met[0].uid)

    def identify(self, context: Any) -> Caller:
        """Return the caller of this call (a `grpc.aio.ServicerContext`)."""
        known = self.authenticator.authenticate(get_authorization(context.invocation_metadata()))
        met = self._proxy.find_peer(context.peer())
        if met is None and self._is_mutual_tls and context.auth_context().get("x509_pem_cert"):
            return Caller(AccessLevel.ALL, known.name)
        if met is None:
            return Caller(known.access, known.name)
        peer, guests = met
        by_itself = (
            AccessLevel.ALL
            if guests.is_trusted(peer)
            else AccessLevel.USE
            if guests.is_allowed(peer)
            else AccessLevel.NONE
        )
        return Caller(max(known.access, by_itself), known.name, peer)


def get_authorization(metadata: Iterable[Any] | None) -> str:
    """The credential in the metadata of a call: the value of its header, or ''."""
    values = [value for key, value in metadata or () if key == _METADATA_KEY]
    return values[0] if values and isinstance(values[0], str) else ""
