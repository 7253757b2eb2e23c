"""What fails in a rank's own process amid a collective on GPUs leaves it no step behind the others, either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.e2e.faults.collective_scenes import SOON, Array, Scene, add
from tests.e2e.faults.planting import find_lines
from tests.e2e.faults.stepping import plant_each, stage
from tests.e2e.gpu.cluster import Cluster, filled

import collectived as cd
from collectived.gpu import array

pytestmark = pytest.mark.usefixtures("cuda")


@pytest.fixture(scope="module")
def fake_gpus(start: Callable[..., Cluster]) -> Cluster:
    return start(1)


def on_gpu(group: cd.Group, value: Array) -> Any:
    return filled(group._session, value)  # type: ignore[arg-type]  # it is one


def reduce(group: cd.Group, value: Array) -> Any:
    return np.asarray(group.all_reduce("sum", on_gpu(group, value), SOON))[0]


def reduce_into(group: cd.Group, value: Array) -> Any:
    into = on_gpu(group, 0 * value)
    assert group.all_reduce("sum", on_gpu(group, value), SOON, out=into) is into
    return np.asarray(into)[0]


def reduce_later(group: cd.Group, value: Array) -> Any:
    return np.asarray(group.all_reduce("sum", on_gpu(group, value), async_op=True).result())[0]


def gather(group: cd.Group, value: Array) -> Any:
    return add(np.asarray(group.all_gather(on_gpu(group, value))), group, value)


def exchange(group: cd.Group, value: Array) -> Any:
    return add(np.asarray(group.all_to_all(on_gpu(group, value))), group, value)


SCENES = {
    "all_reduce": Scene(reduce),
    "out": Scene(reduce_into),
    "asynchronous": Scene(reduce_later, is_async=True),
    "all_gather": Scene(gather),
    "all_to_all": Scene(exchange),
    "repeated": Scene(reduce, earlier=1),
}


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers
@pytest.mark.parametrize("scene", SCENES)
def test_an_error_at_any_line_of_a_collective_on_gpus_shifts_no_sum(fake_gpus: Cluster, scene: str) -> None:
    with stage(fake_gpus, scene, "GPU:0") as play:
        lines = find_lines(lambda on_line: play(SCENES[scene], on_line))
        assert any("device" in code.co_filename for code, _ in lines)
        left = [line for line in lines if line[0].co_filename != array.__file__]  # what its caller does with arrays
        missed = plant_each(lambda on_line: play(SCENES[scene], on_line), left, lines)
    assert missed == []
