"""The credential of a command. Daemons answer to it over TCP, or at a Unix socket where they do not know the user.

It comes from a variable or from a file that one names, never from the command line, where others could read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import grpc

from collectived_proto.private_files import PrivateFileError, read_credential

SECRET_FILE, SECRET, TOKEN_FILE = "COLLECTIVED_SECRET_FILE", "COLLECTIVED_SECRET", "COLLECTIVED_VIEWING_TOKEN_FILE"


def find_credential(environment: Mapping[str, str], address: str) -> str:
    """The secret or a client token, else a viewing token, which is good for looking only; '' where nothing says one.

    Raises:
        click.UsageError: the file that should hold it cannot be used, and the address is none of this host's own; or
            every user may read it.
    """
    for variable in (SECRET_FILE, SECRET, TOKEN_FILE):
        told = environment.get(variable, "")
        if not told or variable == SECRET:
            found = told.strip()
        else:
            found = _read_credential_file(variable, Path(told), needed=not address.startswith("unix:"))
        if found:
            return found
    return ""


def _read_credential_file(variable: str, path: Path, needed: bool) -> str:
    try:
        return read_credential(path, needed)
    except PrivateFileError as error:
        raise click.UsageError(f"{variable}={str(path)!r} {error}") from None


def attach_credential(channel: grpc.Channel, address: str, environment: Mapping[str, str]) -> grpc.Channel:
    """The same channel, with the credential beside each call."""
    found = find_credential(environment, address)
    return grpc.intercept_channel(channel, _CredentialInterceptor(found)) if found else channel


class _CallDetails(NamedTuple):
    """gRPC's own are an interface: a call is described by anything that has these."""

    method: str
    timeout: float | None
    metadata: list[tuple[str, str]]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


class _CredentialInterceptor(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def __init__(self, shown: str) -> None:
        self._header = ("authorization", f"Bearer {shown}")

    def intercept_unary_unary(self, go_on: Callable[..., Any], details: Any, request: Any) -> Any:
        return go_on(self._add_header(details), request)

    def intercept_unary_stream(self, go_on: Callable[..., Any], details: Any, request: Any) -> Any:
        return go_on(self._add_header(details), request)

    def _add_header(self, details: Any) -> _CallDetails:
        return _CallDetails(
            details.method,
            details.timeout,
            [*(details.metadata or ()), self._header],
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
