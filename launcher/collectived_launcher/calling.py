"""How the command calls daemons: in plain text, or over TLS where the environment says with which certificates; and
with the credential that it names."""

from __future__ import annotations

import os

import click
import grpc

from collectived_launcher.credential import showing
from collectived_proto.tls.dialling import channel_credentials, why_not
from collectived_proto.tls.files import Files, Material, Unusable, load

_OPTIONS = (("grpc.enable_http_proxy", 0),)


def channel(address: str) -> grpc.Channel:
    """A channel to `unix:/path` or `host:port`.

    Raises:
        click.UsageError: a certificate, or a file with a credential, that the environment names cannot be used.
    """
    material = _material(address)
    if material is None:
        dialled = grpc.insecure_channel(address, options=_OPTIONS)
    else:
        dialled = grpc.secure_channel(address, channel_credentials(material), options=_OPTIONS)
    return showing(dialled, address, os.environ)


def why(address: str, error: grpc.RpcError) -> str:
    """Why that call failed, for people."""
    said = str(error.details() or error.code().name)
    reason = why_not(address, _material(address)) if error.code() is grpc.StatusCode.UNAVAILABLE else ""
    return f"{reason} ({said})" if reason else said


def _material(address: str) -> Material | None:
    named = Files.of_environment(os.environ)
    if address.startswith("unix:") or not named:
        return None
    try:
        return load(named)
    except Unusable as error:
        raise click.UsageError(str(error)) from None
