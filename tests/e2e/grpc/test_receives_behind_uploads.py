"""A receive of a rank over gRPC whose turn comes only when a large send before it has been uploaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectived as cd


@pytest.mark.parametrize("transport", ["grpc"], indirect=True)
def test_a_receive_whose_time_is_over_before_its_turn_comes_ends_alone(one_worker: Any, transport: str) -> None:
    def body(group: cd.Group) -> Any:
        if group.rank == 1:
            assert len(group.recv(0, timeout=40)) == 25_000_000
            group.send(1.0, 0, timeout=40)
        else:
            sent = group.send(np.ones(25_000_000), 1, async_op=True)
            with pytest.raises(cd.errors.DeadlineExceededError) as caught:
                group.recv(1, timeout=0.01)
            assert not caught.value.rejoin
            assert group.recv(1, timeout=40) == 1.0
            sent.result()
        return group.all_reduce("sum", 1.0, timeout=40)

    assert one_worker.run(2, body) == [2.0, 2.0]
