"""Where the peers are installed, each in an environment of its own: `python -m benchmarks.environments`.

An install that fails is reported, and the other libraries are measured all the same.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OWN = ROOT / ".venv"


@dataclass(frozen=True, slots=True)
class Environment:
    """
    name: as in `--only`.
    requirements: what pip is asked for.
    module: what must be importable in it.
    others: environments that do as well, where they are there already.
    """

    name: str
    requirements: tuple[str, ...]
    module: str
    others: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return ROOT / f".venv-bench-{self.name}"

    def found(self) -> Path | None:
        """The environment to use, or None if it has to be installed."""
        for folder in (self.folder, *(ROOT / other for other in self.others)):
            if (folder / "installed").exists():
                return folder
        return None


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("gloo", ("torch==2.13.0", "numpy"), "torch.distributed", (".venv-torch",)),
        Environment("openmpi", ("mpi4py", "openmpi", "numpy"), "mpi4py.MPI"),
        Environment("mpich", ("mpi4py", "mpich", "numpy"), "mpi4py.MPI"),
        Environment("tensorflow", ("tensorflow-cpu", "numpy"), "tensorflow"),
    )
}


def install(environment: Environment) -> str:
    """Makes the environment; '' or why that failed."""
    folder = environment.folder
    python = folder / "bin" / "python"
    steps: Sequence[Sequence[str]] = (
        (sys.executable, "-m", "venv", "--clear", str(folder)),
        (str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *environment.requirements),
        (str(python), "-c", f"import {environment.module}"),
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if folder.exists():
            (folder / ".gitignore").write_text("*\n")
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            return lines[-1] if lines else f"{step[0]} ended with status {done.returncode}"
    (folder / "installed").touch()
    return ""


def main() -> None:
    for environment in ENVIRONMENTS.values():
        if environment.found():
            continue
        print(f"installing {', '.join(environment.requirements)} into {environment.folder.name} (once) ...", flush=True)
        if why := install(environment):
            print(f"{environment.name} will be skipped, its install failed: {why}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
