"""Every file of `scenarios/` is a story with the coordinator in it, and must end as written.

`COLLECTIVED_REWRITE=1 pytest tests/runtime/coordinator` writes what happens into the files, to be read before it is
believed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
SCENARIOS = sorted((HERE / "scenarios").glob("*.txt"))


def _load_player() -> ModuleType:
    name = "coordinator_scenario_player"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / "scenario_player.py")
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _played(text: str) -> str:
    """The file as it should read: the same commands, and the effects that really follow."""
    player = _load_player().Player()
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        end = lines.index("----") if "----" in lines else len(lines)
        commands = [line for line in lines[:end] if not line.startswith("#")]
        effects = [line for command in commands for line in player.play(command)]
        blocks.append("\n".join([*lines[:end], *(["----", *effects] if commands else [])]))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text()
    played = _played(text)
    if os.environ.get("COLLECTIVED_REWRITE"):
        path.write_text(played)
    else:
        assert played == text


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 20
