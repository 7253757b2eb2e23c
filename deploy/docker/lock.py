"""Write the hashes of all packages that the image installs: `make image-lock`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "deploy/docker/requirements.lock"
_HEAD = (
    "# What the image installs beside the wheel, by hash: versions of requirements-dev.lock. "
    "`make image-lock` makes it again.\n"
)
_QUIET = ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host"]


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory(prefix="collectived-lock-") as folder:
        wanted, made = Path(folder, "requirements.in"), Path(folder, "requirements.lock")
        wanted.write_text("\n".join(project["dependencies"]))
        command = [
            sys.executable,
            "-m",
            "piptools",
            "compile",
            "--quiet",
            "--generate-hashes",
            "--strip-extras",
            *_QUIET,
        ]
        constraint = ["--constraint", str(ROOT / "requirements-dev.lock")]
        subprocess.run([*command, *constraint, "--output-file", str(made), str(wanted)], check=True)
        lines = [line for line in made.read_text().splitlines() if not line.startswith("#")]
        LOCK.write_text(_HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
