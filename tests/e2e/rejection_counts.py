"""What daemons of these tests count of what they refuse, as their metrics tell it."""

from __future__ import annotations

import contextlib
import re
import urllib.request
from collections.abc import Iterator

from tests.e2e.conftest import SECRET
from tests.waiting import settle

_SAMPLE = re.compile(r'^(collectived_\w+)\{component="\w+",(?:limit|where)="(\w+)"\} (\S+)$', re.MULTILINE)


def counted(where: str) -> dict[tuple[str, str], float]:
    """By metric and label, what was refused."""
    request = urllib.request.Request(f"http://{where}/metrics", headers={"Authorization": f"Bearer {SECRET}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        page = answer.read().decode()
    return {(name, label): float(value) for name, label, value in _SAMPLE.findall(page)}


@contextlib.contextmanager
def counting(where: str, limit: str, metric: str = "collectived_limit_refusals_total") -> Iterator[None]:
    """What happens here is counted, once at least, under that label."""
    before = counted(where)[metric, limit]
    yield
    settle(lambda: counted(where)[metric, limit] > before)
