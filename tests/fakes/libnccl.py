"""The libnccl of tests: built from fake_libnccl.c where there is a compiler, and driven through what it exports."""

from __future__ import annotations

import ctypes
import enum
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("libnccl.c")
NAME = "libnccl.so.2"


class Setting(enum.IntEnum):
    """What a test can tell it, numbered as in the source."""

    CALL_RESULT = 0
    ASYNC_RESULT = 1
    INIT_POLLS = 2  # how often a new communicator says that it is in progress; -1: forever
    INIT_HANGS = 3
    ABORT_HANGS = 4


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def build(folder: Path) -> Path:
    """Builds it in `folder`; the file has the name by which programs look for NCCL."""
    target = folder / NAME
    cc = compiler()
    assert cc is not None
    options = ["-shared", "-fPIC", "-pthread", f"-Wl,-soname,{NAME}", "-o", str(target), str(SOURCE)]
    subprocess.run([cc, *options], check=True, timeout=60)
    return target


class Fake:
    """It, in this process: whoever looks for NCCL afterwards finds it."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._library.fake_log.restype = ctypes.c_char_p

    def set(self, setting: Setting, value: int) -> None:
        self._library.fake_set(int(setting), value)

    @contextmanager
    def having(self, setting: Setting, value: int) -> Iterator[None]:
        self.set(setting, value)
        try:
            yield
        finally:
            self.set(setting, 0)

    def called(self, what: Callable[[], object]) -> list[str]:
        """The lines that it has written down while `what` was done."""
        self._library.fake_forget()
        what()
        lines: str = self._library.fake_log().decode()
        return lines.splitlines()
