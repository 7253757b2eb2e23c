"""A virtual environment in which `pip install` of a page installs this repository, without a network.

What the package needs besides is that of the environment of the tests, which pip finds installed already.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.docs.blocks import ROOT

import collectived_native

REPOSITORY = "/path/to/this/repository"
WITHIN = 100.0  # seconds


class Installation:
    """A new virtual environment, and a shell in which it is active."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.venv)], check=True, timeout=WITHIN)
        places = {"base": str(self.venv), "platbase": str(self.venv)}
        self.packages = Path(sysconfig.get_path("purelib", vars=places))
        (self.packages / "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        self._write_pip()

    def _write_pip(self) -> None:
        pip = self.venv / "bin/pip"
        pip.write_text(f'#!/bin/sh\nexec {self.venv}/bin/python -m pip "$@"\n')
        pip.chmod(0o700)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the shell. The core is the one that was built here: how it is built, other tests show."""
        return {
            **os.environ,
            "PATH": f"{self.venv}/bin:{os.environ['PATH']}",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # off: the environment of the tests has what builds the package
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "COLLECTIVED_NATIVE": str(Path(collectived_native.__file__).with_name("_core.abi3.so")),
        }

    def run(self, line: str, **variables: str) -> str:
        """What a line of a page prints; it must succeed."""
        done = subprocess.run(
            ["bash", "-c", line.replace(REPOSITORY, str(ROOT))],
            cwd=self.folder,
            env={**self.environment, **variables},
            text=True,
            capture_output=True,
            timeout=WITHIN,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout
