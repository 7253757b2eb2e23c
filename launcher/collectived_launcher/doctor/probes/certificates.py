"""Certificates that callers and daemons of this host are told of, and how long they are good for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from collectived_launcher.doctor.facts import Certificate
from collectived_proto.configuration.daemons import DAEMONS
from collectived_proto.configuration.effective import told
from collectived_proto.configuration.files import find, load
from collectived_proto.tls import files
from collectived_proto.tls.files import Files


def certificates(variables: Mapping[str, str]) -> tuple[Certificate, ...]:
    """Those of the environment, and those of the file that daemons started here read.

    Raises:
        Misconfigured: the file cannot be used.
    """
    named = {"the environment": (Files.of_environment(variables), False), **dict(_of_daemons(variables))}
    return tuple(_look(who, which, serves) for who, (which, serves) in named.items() if which)


def _of_daemons(variables: Mapping[str, str]) -> Iterator[tuple[str, tuple[Files, bool]]]:
    path = find(None, variables)
    if path is None:
        return
    for name, settings in DAEMONS.items():
        values = told(settings, {}, {}, load(path)).values
        yield f"{path} for the {name}", (Files(values["tls_cert"], values["tls_key"], values["tls_ca"]), True)


def _look(named_by: str, which: Files, serves: bool) -> Certificate:
    path = str(which.cert or which.ca or which.key)
    try:
        identity = files.load(which, serves).identity
    except files.Unusable as error:
        return Certificate(named_by, path, trouble=str(error))
    return Certificate(named_by, path, (identity.not_after - datetime.now(UTC)).days if identity else None)
