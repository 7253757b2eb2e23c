"""The cluster on which the snippets of the documentation run."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from tests.e2e.conftest import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(2)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `collectived launch` sets for programs that bring a rendezvous of their own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
