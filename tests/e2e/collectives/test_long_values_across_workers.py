"""Values of several MiB between workers: they are taken part by part, and are the same as those that come whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import collectived as cd

ROWS = 3_001_001  # 12 MB of float32, which neither ranks nor parts divide

CALLS: dict[str, Callable[..., Any]] = {
    "broadcast": lambda group, value, **more: group.broadcast(value, 1, **more),
    "all_reduce": lambda group, value, **more: group.all_reduce("sum", value, **more),
    "all_gather": lambda group, value, **more: group.all_gather(value[: ROWS // 2 + group.rank], **more),
    "all_to_all": lambda group, value, **more: group.all_to_all(value, **more),
    "reduce_scatter": lambda group, value, **more: group.reduce_scatter("max", value, **more),
    "gather": lambda group, value, **more: group.gather(value[: ROWS - group.rank], root=1, **more),
    "scatter": lambda group, value, **more: group.scatter(value if group.rank == 1 else None, root=1, **more),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_blocking_call_gets_the_bits_of_one_that_comes_whole(
    two_workers: Any, size: int, call: Callable[..., Any]
) -> None:
    def body(group: cd.Group) -> bool:
        value = np.random.default_rng(group.rank).standard_normal(ROWS).astype(np.float32)
        whole = call(group, value, async_op=True).result()
        if whole is None:
            return [call(group, value) for _ in range(3)] == [None] * 3
        out, columns = np.zeros_like(whole), np.zeros((len(whole), 2), np.float32)
        new, given, apart = call(group, value), call(group, value, out=out), call(group, value, out=columns[:, 1])
        same = [whole.tobytes() == one.tobytes() for one in (new, given, apart)]
        return all(same) and given is out and not columns[:, 0].any()

    assert all(two_workers.run(size, body))
