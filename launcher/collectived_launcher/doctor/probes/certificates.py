"""Certificates that callers and daemons of this host are told of, and how long they are good for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from collectived_launcher.doctor.facts import Certificate
from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.resolve import resolve_values
from collectived_proto.config.sources import find_config_file, load_config_file
from collectived_proto.tls import files
from collectived_proto.tls.files import TlsFiles


def probe_certificates(variables: Mapping[str, str]) -> tuple[Certificate, ...]:
    """Those of the environment, and those of the file that daemons started here read.

    Raises:
        ConfigError: the file cannot be used.
    """
    named = {"the environment": (TlsFiles.from_environment(variables), False), **dict(_daemon_tls_files(variables))}
    return tuple(_inspect_certificate(who, which, serves) for who, (which, serves) in named.items() if which)


def _daemon_tls_files(variables: Mapping[str, str]) -> Iterator[tuple[str, tuple[TlsFiles, bool]]]:
    path = find_config_file(None, variables)
    if path is None:
        return
    for name, settings in DAEMONS.items():
        values = resolve_values(settings, {}, {}, load_config_file(path)).values
        yield f"{path} for the {name}", (TlsFiles(values["tls_cert"], values["tls_key"], values["tls_ca"]), True)


def _inspect_certificate(named_by: str, which: TlsFiles, serves: bool) -> Certificate:
    path = str(which.cert or which.ca or which.key)
    try:
        identity = files.load_material(which, serves).identity
    except files.TlsFileError as error:
        return Certificate(named_by, path, trouble=str(error))
    return Certificate(named_by, path, (identity.not_after - datetime.now(UTC)).days if identity else None)
