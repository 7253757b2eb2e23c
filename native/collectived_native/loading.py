"""Find, load and check the compiled core."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from collectived_native.sources import FOLDER, digest_sources

NAME = "collectived_native._core"
BESIDE = Path(__file__).with_name("_core.abi3.so")


def load_core() -> ModuleType:
    """Return the compiled core.

    Raises:
        ImportError: there is none for this system or Python, it cannot be read, or it was built from other sources than
            those beside it.
    """
    if sys.platform != "linux":
        raise ImportError(f"the native core of collectived needs Linux, not {sys.platform}: use a session over gRPC")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise ImportError("the native core of collectived does not support free-threaded builds of Python")
    if NAME in sys.modules:  # also of a process that may no longer read the file, for it has become another user
        return sys.modules[NAME]
    path = Path(os.environ.get("COLLECTIVED_NATIVE") or BESIDE)
    try:
        if not path.exists():
            raise ImportError(f"the native core of collectived is not at {path}: {_advise()}", path=str(path))
        sys.modules[NAME] = _load(path)
    except OSError as error:
        raise ImportError(f"the native core of collectived cannot be read: {error}", path=str(path)) from error
    return sys.modules[NAME]


def _load(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    if FOLDER.is_dir() and module.source_digest != digest_sources():
        raise ImportError(
            f"{path} was built from other sources than those in {FOLDER}: run `make native`", path=str(path)
        )
    return module


def _advise() -> str:
    return (
        "run `make native`"
        if FOLDER.is_dir()
        else "install collectived again (pip install --force-reinstall collectived)"
    )
