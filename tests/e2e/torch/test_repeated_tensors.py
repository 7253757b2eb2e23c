"""Tensors in calls that come again from the same line: results are right, and little is done for each call."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.torch.running import run_well

import collectived as cd

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")
pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_results_are_right_whatever_out_is(one_worker: Any, dtype: Any) -> None:
    def body(group: cd.Group) -> None:
        base = torch.zeros(6).to(dtype)
        makes: list[tuple[Any, Any]] = [
            (lambda: torch.full((3,), group.rank + 1).to(dtype), lambda _: None),
            (lambda: torch.full((3,), group.rank + 1).to(dtype), lambda value: value),
            (lambda: torch.full((3,), group.rank + 1).to(dtype), lambda _: torch.empty(3).to(dtype)),
            (lambda: torch.full((3,), group.rank + 1).to(dtype), lambda _: torch.empty(6).to(dtype)[::2]),
            (lambda: base[:3].fill_(group.rank + 1), lambda _: base[1:4]),
            (lambda: torch.full((6,), group.rank + 1).to(dtype)[::2], lambda _: None),
        ]
        for make_value, make_out in makes:
            for _ in range(3):
                value = make_value()
                out = make_out(value)
                result = group.all_reduce("sum", value, out=out)
                assert type(result) is torch.Tensor and result.dtype is dtype
                assert out is None or result is out
                assert result.tolist() == [3, 3, 3]

    one_worker.run(2, body)


def test_what_looks_otherwise_than_before_is_taken_or_refused_as_ever(one_worker: Any) -> None:
    def body(group: cd.Group) -> None:
        trained = torch.ones(2, requires_grad=True)
        conjugated = torch.tensor([1 + 2j, 1 + 2j]).conj()
        for value, expected in ((torch.ones(2), [2, 2]), (trained, [2, 2]), (trained * 2, [4, 4])) * 2:
            assert group.all_reduce("sum", value).tolist() == expected
        for value in (torch.tensor([1 + 2j, 1 + 2j]), conjugated, conjugated):
            assert group.all_reduce("sum", value).tolist() == [2 * one for one in value.tolist()]
        written = torch.zeros(2, dtype=torch.complex64)
        for out, fits in ((written, True), (conjugated, False), (written[:1].expand(2), False)):
            with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="cannot be written"):
                assert group.all_reduce("sum", torch.tensor([1j, 1j]), out=out).tolist() == [2j, 2j]

    one_worker.run(2, body)


WORK = """
import tracemalloc
import numpy as np
import collectived as cd
init()

def count_calls(call):
    '''How many functions of Python one call runs, once its line is known.'''
    found = 0
    def see(frame, event, argument):
        nonlocal found
        found += event == "call"
    for _ in range(3):
        call()
    dist.barrier()
    sys.setprofile(see)
    call()
    sys.setprofile(None)
    return found

with cd.connect() as session, session.join() as group:
    array, tensor = np.ones(4), torch.ones(4)
    of_array = count_calls(lambda: group.all_reduce("sum", array, out=array))
    of_tensor = count_calls(lambda: group.all_reduce("sum", tensor, out=tensor))
    of_c10d = count_calls(lambda: dist.all_reduce(tensor))
    print(of_array, of_tensor, of_c10d)

big, whole = torch.ones(1 << 20), torch.ones(size << 20)
for call in (
    lambda: dist.all_reduce(big),
    lambda: dist.all_reduce(big, async_op=True).wait(),
    lambda: dist.broadcast(big, 0),
    lambda: dist.group.WORLD.all_gather_single(whole, big).wait(),
    lambda: dist.group.WORLD.reduce_scatter_single(big, whole).wait(),
    lambda: dist.group.WORLD.all_to_all_single(whole, whole.clone(), [], []).wait(),
):
    call()
    tracemalloc.start()
    call()
    print(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
"""


def test_no_call_copies_its_value_and_a_tensor_costs_little_more_than_an_array(one_worker: Any, tmp_path: Path) -> None:
    for output in run_well(one_worker, tmp_path / "store", 2, WORK):
        counts, *peaks = output.splitlines()
        of_array, of_tensor, of_c10d = map(int, counts.split())
        assert of_tensor <= of_array + 10 and of_c10d <= of_array + 45
        assert len(peaks) == 6 and max(map(int, peaks)) < 1 << 20, "of values of 4 MiB"
