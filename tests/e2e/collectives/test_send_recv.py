"""Messages between real ranks: many of them posted before they are sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectived as cd

POSTED = 100  # more than collectives may be in flight


@pytest.mark.parametrize("transport", ["shared memory", "grpc"], indirect=True)
@pytest.mark.parametrize("workers", [1, 2])
def test_receives_posted_before_their_sends_take_them_and_hold_up_no_collective(
    request: pytest.FixtureRequest, workers: int, transport: str
) -> None:
    cluster: Any = request.getfixturevalue("one_worker" if workers == 1 else "two_workers")

    def body(group: cd.Group) -> list[float]:
        other = 1 - group.rank
        posted = [group.recv(other, tag % 7, async_op=True, timeout=40) for tag in range(POSTED)]
        assert group.all_reduce("sum", 1.0, timeout=40) == 2.0, "they do not count against collectives"
        assert not any(work.done() for work in posted)
        for number in range(POSTED):
            group.send(np.full(3, float(number)), other, number % 7, timeout=40)
        return [float(value[0]) for value in cd.wait(posted)]

    assert cluster.run(2, body) == [[float(number) for number in range(POSTED)]] * 2
