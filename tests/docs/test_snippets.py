"""The snippets of docs/guide/from-*.md that are marked ```python run do and print what they say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tests.docs.contents import ROOT
from tests.docs.running import expected, printed
from tests.e2e.conftest import Cluster

PAGES = sorted((ROOT / "docs/guide").glob("from-*.md"))
_BLOCK = re.compile(r"^```python run\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Snippet(NamedTuple):
    place: str
    source: str


def snippets() -> Iterator[Snippet]:
    for page in PAGES:
        text = page.read_text()
        for found in _BLOCK.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield Snippet(f"{page.stem}:{line}", found[1])


def test_every_page_has_some() -> None:
    assert {snippet.place.partition(":")[0] for snippet in snippets()} == {page.stem for page in PAGES}
    assert len(PAGES) == 3


@pytest.mark.parametrize("snippet", list(snippets()), ids=lambda snippet: str(snippet.place))
def test_it_prints_what_it_says(snippet: Snippet, cluster: Cluster) -> None:
    if "import torch" in snippet.source:
        pytest.importorskip("torch", reason="torch is not installed: make test-torch")
    assert printed(cluster, snippet.source, snippet.place) == expected(snippet.source)
