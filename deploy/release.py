"""Make a release: `make release VERSION=0.2.0` writes the version wherever it stands, commits, and sets the tag v0.2.0.

RELEASE in `proto/collectived_proto/types.py` is the version of the package. The other places are those that people
copy: images, the recipe for conda-forge, man pages. All of them agree in the commit that has the tag, so wheels are of
that version whether they are built from the checkout or from the sdist. `make wheels` refuses a tag that differs.
"""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
TYPES = "proto/collectived_proto/types.py"
VERSIONS = "proto/collectived_proto/version.py"
CHANGELOG, HISTORY = "CHANGELOG.md", "proto/released/README.md"
PLACES = {  # file or pattern of files: what stands before the version and behind it
    TYPES: (r'^RELEASE = "', '"$'),
    "deploy/conda/recipe.yaml": (r'^  version: "', '"$'),
    "deploy/compose/compose.yaml": ("image: collectived:", "$"),
    "deploy/docker/Dockerfile": ("--tag collectived:", r" \.$"),
    "deploy/kubernetes/base/kustomization.yaml": ('newTag: "', '"$'),
    "deploy/kubernetes/examples/train.yaml": ("image: collectived:", r"\b"),
    "launcher/man/*.1": ('^\\.TH .*"collectived ', '" "User Commands"$'),
}
_VERSION = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"


def find_files() -> list[str]:
    """The files that a release writes."""
    places = [str(path.relative_to(ROOT)) for pattern in PLACES for path in sorted(ROOT.glob(pattern))]
    return [*places, CHANGELOG, HISTORY, VERSIONS]


def edit(texts: Mapping[str, str], version: str, date: str) -> dict[str, str]:
    """The texts of the files in the release. Pure.

    Raises:
        SystemExit: the version is none, or comes before that of the code; or a file has no place for it.
    """
    if not re.fullmatch(_VERSION, version):
        raise SystemExit(f"VERSION={version!r} is no version: expected one such as 0.2.0 or 0.2.0rc1")
    before = _find_release(texts[TYPES])
    if _order(version) < _order(before):
        raise SystemExit(f"VERSION={version} comes before {before}, which RELEASE in {TYPES} is: expected a later one")
    edited = dict(texts)
    for name, text in texts.items():
        for pattern, (head, tail) in PLACES.items():
            if Path(name).match(pattern):
                edited[name], count = re.subn(f"({head}){_VERSION}({tail})", rf"\g<1>{version}\g<2>", text, flags=re.M)
                if count != 1:
                    raise SystemExit(f"{name} has {count} places for the version, expected one")
    edited[CHANGELOG] = _close_unreleased(texts[CHANGELOG], version, date)
    edited[HISTORY] = _add_row(texts[HISTORY], texts[VERSIONS], version)
    return edited


def _find_release(text: str) -> str:
    found = re.search(rf'^RELEASE = "({_VERSION})"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"{TYPES} has no RELEASE")
    return found[1]


def _order(version: str) -> tuple[int, int, int, str, int]:
    """Candidates come before their release."""
    numbers, kind, number = re.match(r"(\d+\.\d+\.\d+)([a-z]*)(\d*)", version).groups()  # type: ignore[union-attr]
    major, minor, patch = map(int, numbers.split("."))
    return major, minor, patch, kind or "~", int(number or 0)


def _close_unreleased(text: str, version: str, date: str) -> str:
    heading = "## [Unreleased]\n"
    if f"## [{version}]" in text or text.count(heading) != 1:
        raise SystemExit(f"{CHANGELOG}: expected one heading {heading.strip()!r}, and none of {version}")
    return text.replace(heading, f"{heading}\n## [{version}] - {date}\n")


def _add_row(text: str, versions: str, version: str) -> str:
    """The protocol that this minor release speaks, unless it stands there already."""
    minor = version.rpartition(".")[0]
    spoken = re.search(r"^OUR_VERSIONS = VersionRange\((\d+), (\d+), RELEASE\)$", versions, re.MULTILINE)
    if spoken is None:
        raise SystemExit(f"{VERSIONS} has no OUR_VERSIONS")
    return text if f"\n| {minor} |" in text else f"{text}| {minor} | {spoken[1]} | {spoken[2]} |\n"


def read_git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    version = sys.argv[1] if sys.argv[1:] else ""
    if read_git("status", "--porcelain"):
        raise SystemExit("there are changes that are not committed: commit them, or put them away")
    if read_git("tag", "--list", f"v{version}"):
        raise SystemExit(f"there is a tag v{version} already: expected the version of a release that is to come")
    texts = {name: (ROOT / name).read_text() for name in find_files()}
    for name, text in edit(texts, version, datetime.datetime.now(datetime.UTC).date().isoformat()).items():
        (ROOT / name).write_text(text)
    for path in (ROOT / "proto/collectived_proto/v1").glob("*.proto"):
        shutil.copyfile(path, ROOT / "proto/released/collectived_proto/v1" / path.name)
    read_git("add", "--all")
    read_git("commit", "--message", f"Release {version}")
    read_git("tag", "--annotate", f"v{version}", "--message", f"Release {version}")
    print(f"committed, with the tag v{version}: `make wheels` builds it; push both when it is well")


if __name__ == "__main__":
    main()
