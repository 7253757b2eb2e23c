"""What fails in a rank's own process amid a collective never leaves it a step behind the others."""

from __future__ import annotations

from typing import Any

import pytest
from tests.e2e.faults.collective_scenes import AGAIN, OTHERS, SCENES
from tests.e2e.faults.planting import STRIDE, Line, find_lines
from tests.e2e.faults.stepping import plant_each, stage

_found: dict[tuple[int, str, str], dict[Line, bool]] = {}  # lines, of workers, transport and scene

COUNTS = {1: "one worker", 2: "two workers"}
WAYS = [(workers, transport) for workers in COUNTS for transport in ("", "grpc")]


def list_ways(number: int, scene: str) -> list[tuple[int, str]]:
    """Over which workers and transports a scene is played; of many scenes `make test` takes one way in turn."""
    if SCENES[scene].late:  # elsewhere a rank that waits comes to no other line
        return WAYS[:1]
    is_one_of_many = scene.removesuffix(AGAIN) in OTHERS and STRIDE > 1
    return [WAYS[number % len(WAYS)]] if is_one_of_many else WAYS


CELLS = [
    pytest.param(workers, transport, scene, id=f"{scene}, {COUNTS[workers]}, {transport or 'shared memory'}")
    for number, scene in enumerate(SCENES)
    for workers, transport in list_ways(number, scene)
]


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers
@pytest.mark.parametrize(("workers", "transport", "scene"), CELLS, indirect=["transport"])
def test_an_error_at_any_line_of_a_collective_shifts_no_sum(
    grown: Any, request: pytest.FixtureRequest, workers: int, transport: str, scene: str
) -> None:
    """At every STRIDE-th line, each of which is reached; COLLECTIVED_TEST_STRIDE=1: at each."""
    played = SCENES[scene]
    with stage(grown(workers), request.node.name) as play:

        def find(scene: str) -> dict[Line, bool]:
            if (workers, transport, scene) not in _found:
                _found[workers, transport, scene] = find_lines(lambda on_line: play(SCENES[scene], on_line))
            return _found[workers, transport, scene]

        lines = find(scene)
        elsewhere = find(played.beyond) if played.beyond else {}
        assert len(lines) > (20 if not played.earlier else 10)  # of a call that is repeated most is in the core
        left = [line for line in lines if not elsewhere.get(line)]
        missed = plant_each(lambda on_line: play(played, on_line), left, lines)
    assert missed == []
