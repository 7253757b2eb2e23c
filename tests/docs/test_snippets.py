"""Snippets that are marked ```python run do and print what they say, as two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.blocks import ROOT, Block, claimed
from tests.docs.running import expected, printed
from tests.e2e.conftest import Cluster

PAGES = sorted((ROOT / "docs/guide").glob("from-*.md"))
SNIPPETS = claimed(__file__)


def test_every_page_has_some() -> None:
    assert len(PAGES) == 3
    assert {ROOT / snippet.page for snippet in SNIPPETS} == set(PAGES)
    assert {snippet.language for snippet in SNIPPETS} == {"python"}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: f"{Path(snippet.page).stem}:{snippet.line}")
def test_it_prints_what_it_says(snippet: Block, cluster: Cluster) -> None:
    if "import torch" in snippet.text:
        pytest.importorskip("torch", reason="torch is not installed: make test-torch")
    assert printed(cluster, snippet.text, snippet.place) == expected(snippet.text)
