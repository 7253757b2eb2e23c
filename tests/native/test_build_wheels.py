"""Whether a commit is a release, by its tag and by the code."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BUILDING = runpy.run_path(str(Path(__file__).parents[2] / "native/build_wheels.py"), run_name="build_wheels")
check_release = BUILDING["check_release"]


def test_the_tag_of_a_release_is_that_of_the_code() -> None:
    assert check_release("1.2.3", ["v1.2.3", "tested"]) == "release 1.2.3"


@pytest.mark.parametrize("tags", [[], ["tested"], ["v1"]])
def test_a_commit_without_such_a_tag_is_no_release(tags: list[str]) -> None:
    assert check_release("1.2.3", tags) == "no release: the commit has no tag v1.2.3"


def test_a_tag_of_another_release_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"has the tag v1\.2\.4, and RELEASE in .* is 1\.2\.3: change one"):
        check_release("1.2.3", ["v1.2.4"])
