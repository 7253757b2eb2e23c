"""The build of the core, which is no package, for tests about it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

NATIVE = Path(__file__).parents[2] / "native"


def load(name: str) -> ModuleType:
    """Return `native/<name>.py` as a module."""
    spec = importlib.util.spec_from_file_location(name, NATIVE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


compile_core = load("compile_core")
