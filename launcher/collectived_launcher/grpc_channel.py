"""How the command calls daemons: in plain text, or over TLS where the environment says with which certificates; and
with the credential that it names."""

from __future__ import annotations

import os

import click
import grpc

from collectived_launcher.credential import attach_credential
from collectived_proto.error_status import describe_failure
from collectived_proto.tls.client import channel_credentials, diagnose_connection
from collectived_proto.tls.files import TlsFileError, TlsFiles, TlsMaterial, load_material

_OPTIONS = (("grpc.enable_http_proxy", 0),)


def open_channel(address: str) -> grpc.Channel:
    """A channel to `unix:/path` or `host:port`.

    Raises:
        click.UsageError: a certificate, or a file with a credential, that the environment names cannot be used.
    """
    material = _load_tls_material(address)
    if material is None:
        dialled = grpc.insecure_channel(address, options=_OPTIONS)
    else:
        dialled = grpc.secure_channel(address, channel_credentials(material), options=_OPTIONS)
    return attach_credential(dialled, address, os.environ)


def describe_rpc_error(address: str, error: grpc.RpcError) -> str:
    """Why that call failed, for people."""
    said = describe_failure(error)
    reason = (
        diagnose_connection(address, _load_tls_material(address)) if error.code() is grpc.StatusCode.UNAVAILABLE else ""
    )
    return f"{reason} ({said})" if reason else said


def _load_tls_material(address: str) -> TlsMaterial | None:
    named = TlsFiles.from_environment(os.environ)
    if address.startswith("unix:") or not named:
        return None
    try:
        return load_material(named)
    except TlsFileError as error:
        raise click.UsageError(str(error)) from None
