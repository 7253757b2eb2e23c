"""Adapters by which other libraries use these collectives. Each submodule imports its library at its first use."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ray", "torch"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: expected one of {', '.join(__all__)}")
