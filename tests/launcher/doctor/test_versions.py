"""Versions: what fulfils a demand, and how far releases are apart."""

from __future__ import annotations

import importlib.metadata as metadata

import pytest

from collectived_launcher.doctor.versions import parse_requirement, parse_version, release_distance, satisfies


@pytest.mark.parametrize(
    ("version", "wanted", "does"),
    [
        ("1.85.1", ">=1.74", True),
        ("1.9", ">=1.74", False),
        ("7.36.2", ">=6.31.1,<8", True),
        ("8.0", ">=6.31.1,<8", False),
        ("6.31.0", ">=6.31.1,<8", False),
        ("2.0", ">=2.0.0", True),
        ("2.0.0", "==2.0", True),
        ("2.1", "==2.0", False),
        ("3.11.7", "==3.11.*", True),
        ("3.12.0", "!=3.11.*", True),
        ("0.6.9", "~=0.6.0", True),
        ("0.7.0", "~=0.6.0", False),
        ("2.5", ">2.4,<=2.5,!=2.4.1", True),
        ("2.5.0rc1", ">=2.5", True),
        ("1.0", "", True),
    ],
)
def test_what_fulfils_a_demand(version: str, wanted: str, does: bool) -> None:
    assert satisfies(version, wanted) is does


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("grpcio>=1.74", ("grpcio", ">=1.74")),
        ("protobuf<8,>=6.31.1", ("protobuf", "<8,>=6.31.1")),
        ("click (>=8.1)", ("click", ">=8.1")),
        ("rich[jupyter]>=13", ("rich", ">=13")),
        ("numpy", ("numpy", "")),
        ('tomli>=2; python_version < "3.11"', ("tomli", ">=2")),
        ('torch>=2.4; extra == "torch"', None),
    ],
)
def test_requirements_as_metadata_has_them(text: str, read: tuple[str, str] | None) -> None:
    assert parse_requirement(text) == read


def test_our_own_requirements_are_all_understood() -> None:
    base = [text for text in metadata.requires("collectived") or () if "extra" not in text]
    assert len(base) >= 10
    assert all(found and parse_version(found[1].lstrip("<>=~!")) for found in map(parse_requirement, base))


@pytest.mark.parametrize(
    ("one", "other", "distance"), [("0.1.0", "0.1.7", 0), ("0.2.0", "0.1.7", 1), ("0.1", "0.4", 2), ("1.0", "0.9", 2)]
)
def test_how_far_releases_are_apart(one: str, other: str, distance: int) -> None:
    assert release_distance(one, other) == release_distance(other, one) == distance
