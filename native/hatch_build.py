"""Hook of hatchling: the native core in the wheel, or in place for an editable installation.

Where no C compiler is installed, the hook asks for Zig's as a build dependency. Elsewhere than on Linux the wheel is
pure Python: client and tools work over gRPC alone.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_COMPILING = runpy.run_path(str(Path(__file__).with_name("compile_core.py")), run_name="compile_core")
INSIDE = f"collectived_native/{_COMPILING['MODULE']}"


class NativeHook(BuildHookInterface):  # type: ignore[misc]  # hatchling is there only while a wheel is built
    """The hook that hatchling calls while it builds a wheel.

    `COLLECTIVED_NATIVE` names a core that was built elsewhere, to be taken as it is; `COLLECTIVED_NATIVE_ARCHITECTURE`
    the architecture of a release, for which Zig compiles.
    """

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return what must be installed before the core is built."""
        if sys.platform != "linux" or os.environ.get("COLLECTIVED_NATIVE"):
            return []
        return [] if _COMPILING["find_compiler"]() and not self._architecture else [_COMPILING["ZIG"]]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the core and say which wheel this becomes."""
        if sys.platform != "linux":
            self.app.display_warning("the native core needs Linux: this wheel works over gRPC alone")
            return
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise RuntimeError("collectived does not support free-threaded builds of Python: use one with the GIL")
        if version == "editable":
            target = Path(self.root, "native", INSIDE)
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="collectived-core-")
            target = Path(self._folder.name, _COMPILING["MODULE"])
            build_data["force_include"][str(target)] = INSIDE
        if ready := os.environ.get("COLLECTIVED_NATIVE"):
            shutil.copyfile(ready, target)
        else:
            _COMPILING["compile_core"](target, architecture=self._architecture)
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-linux_{self._architecture or platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was built aside."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    @property
    def _architecture(self) -> str:
        return os.environ.get("COLLECTIVED_NATIVE_ARCHITECTURE", "")
