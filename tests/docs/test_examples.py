"""Every example of the reference does and prints what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.contents import EXAMPLES, RAY
from tests.docs.running import expected, printed
from tests.e2e.conftest import Cluster

ON_RAY = EXAMPLES / f"{RAY}.py"  # a program of its own, no rank: tests/e2e/ray runs it


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", sorted(set(EXAMPLES.glob("*.py")) - {ON_RAY}), ids=lambda path: str(path.stem))
def test_it_prints_what_it_says(path: Path, cluster: Cluster) -> None:
    source = path.read_text()
    if "import torch" in source:
        pytest.importorskip("torch", reason="torch is not installed: make test-torch")
    assert printed(cluster, source, path.stem) == expected(source)
