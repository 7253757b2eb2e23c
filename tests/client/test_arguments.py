"""What callers of other libraries type: taken where it is plain, else answered with the line to type."""

from __future__ import annotations

import enum
import inspect
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import collectived as cd
from collectived.collectives import Collectives

ReduceOp = enum.Enum("ReduceOp", {"SUM": 0, "AVG": 1})  # as another library has it


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("given", ["a value alone", "an op alone", "swapped"])
def test_a_reduction_without_its_op_first_is_told_what_to_type(make: Any, name: str, given: str) -> None:
    setting = make()
    call = getattr(setting.group, name)
    arguments: dict[str, tuple[Any, ...]] = {
        "a value alone": (np.ones(3),),
        "an op alone": ("sum",),
        "swapped": (np.ones(3), "sum"),
    }
    with pytest.raises(TypeError, match=rf'{name}\("sum", tensor\)$'):
        call(*arguments[given])
    assert setting.far.rings == []
    assert inspect.signature(call).parameters["value"].default is inspect.Parameter.empty


def test_reduce_ops_of_other_libraries_are_taken(make: Any) -> None:
    group = make(size=3).group
    assert group.all_reduce(ReduceOp.SUM, 1.0) == 3.0
    assert group.reduce(ReduceOp.AVG, 1.0) == 1.0


CALLS: dict[str, tuple[Any, ...]] = {
    "all_reduce": ("sum", 1.0),
    "reduce": ("sum", 1.0),
    "broadcast": (1.0,),
    "all_gather": (np.ones(2),),
    "gather": (np.ones(2),),
    "scatter": (np.ones(2),),
    "reduce_scatter": ("sum", np.ones(2)),
    "all_to_all": (np.ones(2),),
    "send": (1.0, 1),
    "recv": (1,),
    "barrier": (),
}


def test_the_calls_below_are_all_there_are() -> None:
    public = [name for name, found in inspect.getmembers(Collectives, inspect.isfunction) if not name.startswith("_")]
    assert sorted(CALLS) == public


@pytest.mark.parametrize("name", CALLS)
def test_every_call_takes_a_timeout_by_itself(make: Any, name: str) -> None:
    setting = make()
    setting.far.comes = 1.0
    call, arguments = getattr(setting.group, name), CALLS[name]
    call(*arguments, timeout=5)
    call(*arguments, timeout=timedelta(seconds=7))
    call(*arguments, options=cd.CommunicationOptions(bytes_per_pack=64), timeout=0)
    told = [ring.timeout for ring in setting.far.rings]
    assert told[:2] == [5, 7] and not told[2]
    with pytest.raises(ValueError, match="give one of them"):
        call(*arguments, options=cd.CommunicationOptions(timeout_seconds=3), timeout=5)
    with pytest.raises(ValueError, match="timeout must not be negative"):
        call(*arguments, timeout=-1)
    with pytest.raises(TypeError, match="timeout must be seconds"):
        call(*arguments, timeout="5")
    assert len(setting.far.rings) == 3
