"""The pytest plugin of collectived: the fixture `collectived_job`.

A package of its own, because pytest imports its plugins in every run, and this one must not bring gRPC and NumPy along
where no test asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collectived.testing import LocalJob

_WORKERS = "collectived_workers"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(_WORKERS, "workers of the fixture collectived_job", default="2")


@pytest.fixture(scope="module")
def collectived_job(request: pytest.FixtureRequest) -> Iterator[LocalJob]:
    """A coordinator and workers on this host, shared by the tests of a module: `collectived.testing.LocalJob`.

    How many workers says `collectived_workers` in pytest's configuration, by default 2.
    """
    from collectived.testing import local

    text = request.config.getini(_WORKERS)
    if not str(text).isdigit():
        raise pytest.UsageError(f"{_WORKERS} must be a whole number from 1 to 64, it is {text!r}")
    with local(int(text)) as job:
        yield job
