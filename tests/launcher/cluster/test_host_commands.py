"""The commands that one host is given for `up`, `down` and `run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectived_launcher.cluster.hosts import HOST_COMMANDS_MODULE


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("state", ""), {"running": False, "clusters": ""}),
        (("secret", "lab"), {"secret": ""}),
        (("down", "lab", '{"now": true}'), {"ran": False}),
        (("stat", ""), {"trouble": "there is no command 'stat': expected up, down, state, logs or secret"}),
    ],
)
def test_every_command_is_answered_and_no_other_is_taken_for_one(
    tmp_path: Path, words: tuple[str, ...], answer: dict[str, object]
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", HOST_COMMANDS_MODULE, *words],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == answer
