"""`make release` writes the version wherever it stands, and what is built at its tag is of that version."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tests.e2e.deploy.commands import ROOT

from collectived_proto.types import RELEASE

RELEASING = runpy.run_path(str(ROOT / "deploy/release.py"), run_name="release")
edit, find_files, TYPES = RELEASING["edit"], RELEASING["find_files"], RELEASING["TYPES"]
TEXTS = {name: (ROOT / name).read_text() for name in find_files()}
NEXT = "17.2.0"
CORE = str(ROOT / "native/collectived_native/_core.abi3.so")


def test_every_place_has_the_version_of_the_code_and_gets_the_new_one() -> None:
    edited = edit(TEXTS, NEXT, "2030-01-02")
    for name in TEXTS.keys() - {"CHANGELOG.md", "proto/released/README.md", "proto/collectived_proto/version.py"}:
        assert edited[name] == TEXTS[name].replace(RELEASE, NEXT) != TEXTS[name], name
    assert f"## [Unreleased]\n\n## [{NEXT}] - 2030-01-02\n" in edited["CHANGELOG.md"]
    assert edited["proto/released/README.md"].endswith("\n| 17.2 | 1 | 1 |\n")


def test_no_other_file_of_deployments_names_a_release_of_ours() -> None:
    deployments = [path for path in (ROOT / "deploy").rglob("*") if path.is_file() and path.suffix not in (".lock", "")]
    named = {str(path.relative_to(ROOT)) for path in deployments if f"collectived:{RELEASE}" in path.read_text()}
    assert named <= set(TEXTS)


def test_the_first_release_may_be_that_of_the_code() -> None:
    assert edit(TEXTS, RELEASE, "2030-01-02")[TYPES] == TEXTS[TYPES]


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("", "VERSION='' is no version: expected one such as 0.2.0"),
        ("v0.2.0", "'v0.2.0' is no version"),
        ("0.0.9", f"VERSION=0.0.9 comes before {RELEASE}"),
        (f"{RELEASE}rc1", f"VERSION={RELEASE}rc1 comes before {RELEASE}"),
    ],
)
def test_a_version_that_cannot_be_is_refused(version: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        edit(TEXTS, version, "2030-01-02")


def test_a_candidate_comes_after_those_of_smaller_numbers() -> None:
    ninth = {path: text.replace(RELEASE, "9.0.0rc9") for path, text in TEXTS.items()}
    assert 'RELEASE = "9.0.0rc10"' in edit(ninth, "9.0.0rc10", "2030-01-02")[TYPES]
    with pytest.raises(SystemExit, match="comes before"):
        edit(ninth, "9.0.0rc8", "2030-01-02")


def run(*command: str, at: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=at, env=os.environ | environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(target: str, at: Path) -> Path:
    """By the build backend, with the core that is compiled already."""
    run(sys.executable, "-m", "hatchling", "build", "--target", target, at=at, COLLECTIVED_NATIVE=CORE)
    (made,) = (at / "dist").glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_tag_of_a_release_gives_its_wheels_from_the_checkout_and_from_the_sdist(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    run("git", "clone", "--quiet", "--shared", str(ROOT), str(checkout), at=tmp_path)
    for name in ("user.name", "user.email"):
        run("git", "config", name, "nobody", at=checkout)
    run(sys.executable, "deploy/release.py", NEXT, at=checkout)
    assert run("git", "tag", "--points-at", "HEAD", at=checkout) == f"v{NEXT}\n"
    assert not run("git", "status", "--porcelain", at=checkout)
    with tarfile.open(build("sdist", checkout)) as sdist:
        sdist.extractall(tmp_path, filter="data")
    for number, source in enumerate((checkout, tmp_path / f"collectived-{NEXT}")):
        wheel = build("wheel", source)
        assert wheel.name.startswith(f"collectived-{NEXT}-cp311-abi3-")
        site = tmp_path / f"site-{number}"
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
        said = run(sys.executable, "-m", "collectived_launcher", "--version", at=tmp_path, PYTHONPATH=str(site))
        assert said == f"collectived, version {NEXT}\n"
        assert (
            f"collectived {NEXT}" in (site / f"collectived-{NEXT}.data/data/share/man/man1/collectived.1").read_text()
        )
