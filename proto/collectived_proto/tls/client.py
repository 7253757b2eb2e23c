"""Calls over TLS: the credentials for gRPC, and why a call failed, for which gRPC gives no reason."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING

from collectived_proto.addresses import parse_address
from collectived_proto.tls.files import TlsMaterial, client_context

if TYPE_CHECKING:
    import grpc

_ALPN = "h2"  # the protocol of gRPC
_EXPIRED, _OTHER_NAME = 10, (62, 64)  # OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED, _HOSTNAME_MISMATCH, _IP_ADDRESS_MISMATCH
_PROBE_SECONDS = 1.0  # for each of the two: to be answered, and to be hung up on


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    """Credentials for gRPC. Without an authority of the job, gRPC trusts its own list."""
    import grpc

    return grpc.ssl_channel_credentials(material.ca or None, material.key or None, material.cert or None)


def diagnose_connection(address: str, material: TlsMaterial | None) -> str:
    """Why a gRPC server at `host:port` cannot be talked to as we do, and what to do: a clause for people.

    It is called once more, and nothing is said to it. '' where TLS is not the reason, and for Unix sockets.

    Args:
        material: with what it was called; None: in plain text.
    """
    if address.startswith("unix:"):
        return ""
    try:
        host, port = parse_address(address)
        with socket.create_connection((host, port), _PROBE_SECONDS) as connection:
            connection.settimeout(_PROBE_SECONDS)
            return _diagnose_plain_text(connection) if material is None else _diagnose_tls(connection, host, material)
    except (OSError, ValueError):  # no process listens there, and gRPC has said so
        return ""


def _diagnose_plain_text(connection: socket.socket) -> str:
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.set_alpn_protocols([_ALPN])
    with anybody.wrap_socket(connection):
        return (
            "it speaks TLS, and was called in plain text: name the certificate of its authority (COLLECTIVED_TLS_CA, "
            "or --tls-ca of a worker), and your own where it demands one (COLLECTIVED_TLS_CERT, COLLECTIVED_TLS_KEY)"
        )


def _diagnose_tls(connection: socket.socket, host: str, material: TlsMaterial) -> str:
    said = material.files.origins
    context = client_context(material)
    context.set_alpn_protocols([_ALPN])
    if not material.ca:  # gRPC then chooses its authorities, and reports errors itself
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        called = context.wrap_socket(connection, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        return f"{error.verify_message.rstrip('.')}; {_remedy(error.verify_code, said['ca'])}"
    except ssl.SSLError as error:
        if error.reason != "WRONG_VERSION_NUMBER":
            return f"TLS with it fails: {error.reason or error}"
        return (
            f"it speaks plain text, and was called with TLS: start it with --tls-cert, or unset "
            f"{_named_variables(material)}"
        )
    with called:
        try:
            ended = not called.recv(1)
        except TimeoutError:
            ended = False
        except OSError:
            ended = True
    if not ended:
        return ""
    if not material.cert:
        return f"it demands a certificate: set {said['cert']} and {said['key']} to a certificate of its authority"
    return (
        f"it does not accept the certificate of {material.files.cert} ({said['cert']}): expected one of its own "
        "authority that has not expired"
    )


def _remedy(verify_code: int, ca: str) -> str:
    if verify_code == _EXPIRED:
        return "have its certificate renewed (`collectived certs renew` where it was made)"
    if verify_code in _OTHER_NAME:
        return "call it by a name that its certificate has, or have one issued for this name"
    return f"its certificate is of another authority than {ca} names"


def _named_variables(material: TlsMaterial) -> str:
    files, said = material.files, material.files.origins
    given: Sequence[str] = [said[which] for which in ("cert", "key", "ca") if getattr(files, which)]
    return ", ".join(given)
