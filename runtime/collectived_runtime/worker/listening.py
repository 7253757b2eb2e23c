"""Where a worker serves."""

from __future__ import annotations

from collections.abc import Sequence


def listening(wanted: Sequence[str], default: str) -> list[str]:
    """The addresses to serve at: always one Unix socket, first, and TCP addresses where some are wanted.

    Raises:
        ValueError: two Unix sockets are wanted.
    """
    local = [address for address in wanted if address.startswith("unix:")]
    if len(local) > 1:
        raise ValueError(
            f"a worker serves at one Unix socket, got {' and '.join(local)}: the others can be symbolic links"
        )
    return [*(local or [default]), *(_with_host(address) for address in wanted if address not in local)]


def _with_host(address: str) -> str:
    host, colon, port = address.rpartition(":")
    return address if host or not colon else f"127.0.0.1:{port}"
