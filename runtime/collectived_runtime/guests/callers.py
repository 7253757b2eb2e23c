"""What a caller may do: by the credential that it shows, and at a Unix socket by who it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from collectived_runtime.credentials import Gate, Right
from collectived_runtime.guests.peers import Peer, why_not
from collectived_runtime.guests.porter import Porter

_KEY = "authorization"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever makes a call.

    right: what it may do. token: the name of the client token that it showed, ''; local: who it is, where it came by a
    Unix socket.
    """

    right: Right
    token: str = ""
    local: Peer | None = None

    @property
    def refusal(self) -> str:
        """What it is told where it may do nothing."""
        if self.local is not None:
            return why_not(self.local)
        return (
            "this address needs the job's secret as metadata 'authorization: Bearer <secret>', and the call brought "
            "none or another: use the worker's Unix socket, or the secret of the job's file"
        )


class Callers:
    """Tells who makes a call.

    Args:
        gate: what credentials are good for.
        porter: who stands at the daemon's Unix sockets.
        mutual: over TCP gRPC lets nobody call who has not shown a certificate, which is as good as the secret.
    """

    def __init__(self, gate: Gate, porter: Porter, mutual: bool = False) -> None:
        self.gate = gate
        self._porter = porter
        self._mutual = mutual

    def of(self, context: Any) -> Caller:
        """Who makes this call (a `grpc.aio.ServicerContext`)."""
        known = self.gate.known(shown(context.invocation_metadata()))
        met = self._porter.caller(context.peer())
        if met is None and self._mutual and context.auth_context().get("x509_pem_cert"):
            return Caller(Right.ALL, known.name)
        if met is None:
            return Caller(known.right, known.name)
        peer, guests = met
        by_itself = Right.ALL if guests.trusts(peer) else Right.USE if guests.serves(peer) else Right.NOTHING
        return Caller(max(known.right, by_itself), known.name, peer)


def shown(metadata: Iterable[Any] | None) -> str:
    """The credential in the metadata of a call: the value of its header, or ''."""
    values = [value for key, value in metadata or () if key == _KEY]
    return values[0] if values and isinstance(values[0], str) else ""
