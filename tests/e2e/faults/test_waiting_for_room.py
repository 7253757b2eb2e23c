"""A call for which there is no room among those in flight waits for it, and no longer than its own deadline."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived_proto.ipc import messages

TIMEOUT = 0.5


@pytest.mark.timeout(150)
@pytest.mark.parametrize("transport", ["shared memory", "grpc"], indirect=True)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("size", [1, 100_000])
def test_the_sixty_fifth_collective_ends_all_at_its_own_deadline(
    request: pytest.FixtureRequest, workers: int, transport: str, size: int, delays: Any
) -> None:
    cluster: Any = request.getfixturevalue("one_worker" if workers == 1 else "two_workers")
    value = np.ones(size, np.float32)

    def story() -> None:
        over = threading.Barrier(2)
        works_of_the_other = range(messages.MAX_OUTSTANDING + 1)

        def body(group: cd.Group) -> Any:
            group.barrier()
            if group.rank:
                over.wait(60)
                with pytest.raises(cd.errors.DeadlineExceededError):
                    for _ in works_of_the_other:  # some complete, if the verdict has not come to this worker yet
                        group.all_reduce("sum", value)
                return None
            works = [group.all_reduce("sum", value, async_op=True) for _ in range(messages.MAX_OUTSTANDING)]
            begun = time.monotonic()
            with pytest.raises(cd.errors.DeadlineExceededError) as caught:
                group.all_reduce("sum", value, timeout=TIMEOUT)
            elapsed = time.monotonic() - begun
            over.wait(60)
            assert all(isinstance(work.exception(10), cd.errors.DeadlineExceededError) for work in works)
            assert transport != "grpc" or "64 collectives of this rank were in flight" in str(caught.value)
            return elapsed

        elapsed = cluster.run(2, body)[0]
        assert TIMEOUT <= elapsed <= TIMEOUT + 0.25 + 0.25 + delays.room

    delays.hold(story)
