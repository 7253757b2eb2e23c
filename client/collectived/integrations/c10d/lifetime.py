"""Works that PyTorch would lose.

Up to 2.6 it holds only the C++ half of a work that Python gives it. When the other half is gone, that waits forever.
"""

from __future__ import annotations

from typing import Any

import torch

LOSES_WORKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)
_MOST = 4096  # works for which the program never waits
_kept: dict[int, Any] = {}


def keep(work: Any) -> None:
    """Keep a work until a thread has waited for it, or has its future."""
    _kept[id(work)] = work
    while len(_kept) > _MOST:
        _kept.pop(next(iter(_kept)), None)


def release(work: Any) -> None:
    """Keep it no longer; no harm where it was not kept."""
    _kept.pop(id(work), None)
