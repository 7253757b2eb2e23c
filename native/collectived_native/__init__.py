"""The native core of collectived: what ranks of one host do in shared memory, in C.

`from collectived_native import core` gives the compiled module. Where it cannot work (not on Linux, a free-threaded
Python, a core that was not built or is older than its sources) that raises one ImportError that says what is missing.
`collectived_native.cores` needs no core. `COLLECTIVED_NATIVE=/path/to/core.so` loads that file instead, for packagers
and sanitizer builds.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from collectived_native.loading import load_core

if TYPE_CHECKING:
    from collectived_native import _core as core
else:

    def __getattr__(name: str) -> ModuleType:
        if name != "core":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return load_core()


__all__ = ["core"]
