"""A run from start to end, with those that need nothing installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.cases import BARRIER, MANY, MOVING, parse
from benchmarks.contestants import FOLD, HOST, SOCKETS, Contestant, Launch, Ports
from benchmarks.crew import free_ports
from benchmarks.distance import Distance
from benchmarks.measure import run
from benchmarks.peers import ORDINARY
from benchmarks.record import REJOIN
from benchmarks.schedule import Pace

PACE = Pace(rounds=2, seconds=0.001, fewest=1, most=3)
ANYWHERE = Distance(processors=[0])  # of one processor nothing is measured
CASES = (parse("4 B"), MANY)


def ends_at_once(folder: Path, ranks: int, ports: Ports) -> Sequence[Launch]:
    return [Launch((sys.executable, "-c", "raise SystemExit('no library here')"), {})]


def leaves_a_file(folder: Path, ranks: int, ports: Ports) -> Sequence[Launch]:
    return [Launch((sys.executable, "-c", "import tempfile; raise SystemExit(tempfile.mkstemp()[1])"), {})]


@pytest.mark.timeout(60)
def test_everybody_is_measured_at_every_size() -> None:
    said: list[str] = []
    result = run((FOLD, SOCKETS), (2,), CASES, PACE, ANYWHERE, said.append)
    assert (result.wrong, result.skipped) == ({}, {})
    assert {(cell.name, cell.case) for cell in result.seconds} == {
        (contestant.name, str(case)) for contestant in (FOLD, SOCKETS) for case in CASES
    }
    assert all(0 < seconds < 1 for seconds in result.seconds.values())
    assert len(said) == len(CASES)


@pytest.mark.timeout(60)
def test_ours_carries_out_every_operation_and_a_floor_sums_alone() -> None:
    said: list[str] = []
    cases = [parse(text) for text in (*(f"{name} 64 B" for name in MOVING), BARRIER)]
    result = run((HOST, FOLD), (2,), cases, PACE, ANYWHERE, said.append)
    assert (result.wrong, result.skipped) == ({}, {})
    measured = {(cell.name, cell.variant, cell.case) for cell in result.seconds if cell.case != REJOIN}
    assert measured == {(HOST.name, ORDINARY, str(case)) for case in cases}


@pytest.mark.timeout(60)
def test_who_does_not_start_is_skipped_with_its_last_words() -> None:
    said: list[str] = []
    broken = Contestant("broken", "broken", "broken", ends_at_once)
    result = run((broken, FOLD), (2,), CASES[:1], PACE, ANYWHERE, said.append)
    assert "no library here" in result.skipped["broken"]
    assert any("broken" in text and "skipped" in text for text in said)
    assert {cell.name for cell in result.seconds} == {FOLD.name}


def test_ports_are_given_in_a_row() -> None:
    first = free_ports(4)
    assert 1024 < first < 32768


@pytest.mark.timeout(60)
def test_files_that_a_contestant_leaves_lying_are_gone_with_it() -> None:
    untidy = Contestant("untidy", "untidy", "untidy", leaves_a_file)
    said: list[str] = []
    result = run((untidy, FOLD), (2,), CASES[:1], PACE, ANYWHERE, said.append)
    left = Path(result.skipped["untidy"].split()[-1])
    assert left.is_absolute() and not left.exists()


class Moves(Distance):
    """Says of each look what it is told, and that the processors are near each other after that."""

    def __init__(self, *looks: bool) -> None:
        super().__init__(processors=[0])
        self.looks = list(looks)

    def is_near(self) -> bool:
        return self.looks.pop(0) if self.looks else True

    def wait(self) -> bool:
        return self.is_near()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("looks", "apart"),
    [
        pytest.param((), 0, id="near at all times"),
        pytest.param((True, False), 0, id="apart after the first turn"),
        pytest.param((False, True), 0, id="apart before the first turn"),
        pytest.param((True, False) * 4, 1, id="apart after each attempt of a turn"),
        pytest.param((False, True) * 4, 1, id="apart before each attempt of a turn"),
    ],
)
def test_a_turn_is_repeated_until_the_processors_are_near_each_other_all_along(
    looks: tuple[bool, ...], apart: int
) -> None:
    distance = Moves(*looks)
    result = run((FOLD,), (2,), CASES[:1], PACE, distance, lambda said: None)
    assert (result.wrong, result.skipped, distance.looks) == ({}, {}, [])
    assert (result.turns, result.apart) == (PACE.rounds, apart)
