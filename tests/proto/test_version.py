"""Which version two sides speak with each other, and what is said where there is none."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from collectived_proto import codec
from collectived_proto.errors import FailedPreconditionError
from collectived_proto.types import RELEASE
from collectived_proto.v1 import common_pb2
from collectived_proto.version import (
    FIRST_VERSIONS,
    MAX_RELEASE_LENGTH,
    OUR_VERSIONS,
    VersionRange,
    negotiate_version,
    sanitize_versions,
)

RELEASED = Path(__file__).parents[2] / "proto/released/README.md"


@pytest.mark.parametrize(
    ("theirs", "ours", "version"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 2), (2, 3), 2), ((4, 4), (1, 9), 4)],
)
def test_two_sides_speak_the_highest_that_both_know(
    theirs: tuple[int, int], ours: tuple[int, int], version: int
) -> None:
    assert negotiate_version(VersionRange(*theirs), "they", "we", VersionRange(*ours)) == version


def test_where_they_share_none_the_error_names_both_and_who_is_to_be_upgraded() -> None:
    old, new = VersionRange(1, 2, "1.3.0"), VersionRange(3, 4, "1.5.1")
    with pytest.raises(FailedPreconditionError) as error:
        negotiate_version(old, "the client", "this worker", new)
    assert str(error.value) == (
        "the client (release 1.3.0, protocol 1 to 2) and this worker (release 1.5.1, protocol 3 to 4) have no version "
        "of the protocol in common: upgrade the client to a release that speaks protocol 3"
    )
    with pytest.raises(FailedPreconditionError, match="upgrade this worker to a release that speaks protocol 3$"):
        negotiate_version(new, "the client", "this worker", old)


def test_who_says_nothing_speaks_the_first_version() -> None:
    assert (
        codec.versions_from_proto(common_pb2.Protocol())
        == sanitize_versions(0, 0)
        == FIRST_VERSIONS
        == VersionRange(1, 1)
    )


def test_a_range_that_is_none_is_the_lowest_of_it() -> None:
    assert sanitize_versions(7, 3) == VersionRange(7, 7)


def test_versions_survive_the_trip() -> None:
    there = VersionRange(2, 5, "1.2.3")
    assert codec.versions_from_proto(codec.versions_to_proto(there)) == there


def test_what_is_told_of_this_release_is_the_version_of_the_package() -> None:
    assert version("collectived") == RELEASE == OUR_VERSIONS.release


def test_a_release_that_somebody_makes_up_neither_fills_a_log_nor_steers_it() -> None:
    release = sanitize_versions(1, 1, "\x1b[31m\n" + "x" * 1000).release
    assert len(release) <= MAX_RELEASE_LENGTH and release.isprintable()


def test_this_release_speaks_what_the_minor_release_before_it_spoke() -> None:
    rows = [
        tuple(map(int, row)) for row in re.findall(r"^\| \d+\.\d+ \| (\d+) \| (\d+) \|$", RELEASED.read_text(), re.M)
    ]
    assert rows[-1] == (OUR_VERSIONS.lowest, OUR_VERSIONS.highest), (
        f"{RELEASED}: the last row is the release that is to come"
    )
    for (_, before), (lowest, highest) in zip(rows, rows[1:], strict=False):
        assert lowest <= before <= highest
