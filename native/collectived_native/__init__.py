"""The native core of collectived: what ranks of one host do in shared memory, in C.

`from collectived_native import core` gives the compiled module. Importing this package where it cannot work (not on
Linux, a free-threaded Python, a core that was not built or is older than its sources) raises one ImportError that says
what is missing. `COLLECTIVED_NATIVE=/path/to/core.so` loads that file instead, for packagers and sanitizer builds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collectived_native.loading import load_core

if TYPE_CHECKING:
    from collectived_native import _core as core
else:
    core = load_core()

__all__ = ["core"]
