"""Which binding of NCCL a worker uses: the configured one, else the first that is there."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from collectived_proto.errors import FailedPreconditionError
from collectived_runtime.device.nccl.interface import Nccl

BINDINGS = {"nccl4py": "Nccl4py", "cupy": "Cupy", "pynccl": "Pynccl"}  # modules of this package, in order of preference
EXTRAS = {"nccl4py": "cuda12 or cuda13", "cupy": "cuda12 or cuda13", "pynccl": "pynccl"}

Load = Callable[[], Nccl]


def _loader(name: str) -> Load:
    def load() -> Nccl:
        made: Nccl = getattr(importlib.import_module(f"{__package__}.{name}"), BINDINGS[name])()
        return made

    return load


LOADERS: Mapping[str, Load] = {name: _loader(name) for name in BINDINGS}


def load_binding(wanted: str = "", loaders: Mapping[str, Load] = LOADERS) -> Nccl:
    """Load a binding, and libnccl with it.

    Args:
        wanted: its name; empty: the first of `loaders` that can be loaded.

    Raises:
        ValueError: there is no binding of that name.
        FailedPreconditionError: it, or libnccl, is missing; the message says what to install.
    """
    if wanted and wanted not in loaders:
        raise ValueError(f"unknown binding of NCCL {wanted!r}: expected one of {', '.join(loaders)}")
    troubles = []
    for name in (wanted,) if wanted else loaders:
        try:
            return loaders[name]()
        except (ImportError, OSError, RuntimeError) as missing:  # each library has an error of its own for "not found"
            troubles.append(f"{name}: {missing} (pip install 'collectived[{_extra(name)}]')")
    raise FailedPreconditionError(f"no binding of NCCL can be loaded: {'; '.join(troubles)}")


def _extra(name: str) -> str:
    return EXTRAS.get(name, name)
