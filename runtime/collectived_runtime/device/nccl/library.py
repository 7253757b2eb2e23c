"""Where libnccl lies, for bindings that do not look themselves."""

from __future__ import annotations

import importlib.util
import os
import re

_LIBRARY = re.compile(r"libnccl\.so\.\d+$")


def find_nccl_folder() -> str | None:
    """The folder of the libnccl that pip has installed; None where it has not."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    places = found.submodule_search_locations or () if found else ()
    for place in places:
        lib = os.path.join(place, "lib")
        if os.path.isdir(lib) and any(_LIBRARY.match(name) for name in os.listdir(lib)):
            return lib
    return None
