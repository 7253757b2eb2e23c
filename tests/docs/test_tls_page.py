"""The session that docs/operate/tls.md shows is what happens when it is typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import claimed

_VOLATILE = re.compile(r"\d{4}-\d\d-\d\d|\b\d+ d\b")


def said(text: str) -> list[str]:
    """Lines without dates; ranks print when they like."""
    lines = [" ".join(_VOLATILE.sub("…", line).split()) for line in text.splitlines()]
    return [line for line in lines if not line.startswith("[rank")] + sorted(
        ln for ln in lines if ln.startswith("[rank")
    )


def test_the_session_that_is_shown(tmp_path: Path) -> None:
    session, program = (block.text for block in claimed(__file__))
    (tmp_path / "mean.py").write_text(f"import collectived as cd\n\n{program}")
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as runtime:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "XDG_RUNTIME_DIR": runtime, "COLUMNS": "160"}
        for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            done = subprocess.run(
                line, shell=True, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=50
            )
            assert done.returncode == 0, done.stderr
            assert said(done.stdout) == said(shown), line
        assert os.listdir(runtime) in ([], ["collectived"])
