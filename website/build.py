"""Build the site into .site/: `make site`.

mike keeps one folder per version in a branch of a repository of its own, .site.git, so that building a site does not
touch this one. `latest` is the version that was built last, and the first page leads to it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS, TARGET = ROOT / ".site.git", ROOT / ".site"
BRANCH = "site"
PROGRAMS = Path(sys.executable).parent


def read_version() -> str:
    """The minor release that pages are about, as 0.1."""
    text = (ROOT / "proto/collectived_proto/types.py").read_text()
    found = re.search(r'^RELEASE = "(\d+\.\d+)', text, re.MULTILINE)
    assert found is not None, "proto/collectived_proto/types.py has no RELEASE"
    return found[1]


def run_git(*command: str) -> bytes:
    """Run git in the repository of versions. Return what it prints."""
    called = ["git", f"--git-dir={VERSIONS}", *command]
    return subprocess.run(
        called, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=make_environment()
    ).stdout


def run_mike(command: str, *arguments: str) -> None:
    """Run a command of mike there."""
    called = [str(PROGRAMS / "mike"), command, "--config-file", "website/mkdocs.yml", "--branch", BRANCH, *arguments]
    subprocess.run(called, check=True, cwd=ROOT, env=make_environment())


def make_environment() -> dict[str, str]:
    """The environment of both: no name of a person is needed, and mike finds mkdocs."""
    who = {f"GIT_{role}_{part}": "site" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    path = f"{PROGRAMS}:{os.environ['PATH']}"
    return (
        os.environ | who | {"GIT_DIR": str(VERSIONS), "NO_MKDOCS_2_WARNING": "1", "PATH": path, "PYTHONPATH": str(ROOT)}
    )


def make_repository() -> None:
    """Make the repository of versions, with one commit, which mike wants to name in its own."""
    run_git("init", "--quiet", "--bare", "--initial-branch=main")
    tree = run_git("mktree").decode().strip()
    run_git("update-ref", "HEAD", run_git("commit-tree", tree, "-m", "Begin").decode().strip())


def main() -> None:
    version = sys.argv[1] if sys.argv[1:] else read_version()
    if not VERSIONS.exists():
        make_repository()
    run_mike("deploy", "--update-aliases", version, "latest")
    run_mike("set-default", "latest")
    shutil.rmtree(TARGET, ignore_errors=True)
    with tarfile.open(fileobj=BytesIO(run_git("archive", "--format=tar", BRANCH))) as archive:
        archive.extractall(TARGET, filter="data")
    print(f"{TARGET.relative_to(ROOT)}/ has version {version}: python -m http.server --directory .site")


if __name__ == "__main__":
    main()
