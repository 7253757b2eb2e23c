"""The measurements that one rank has to make. The command passes them as one JSON object."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import numpy as np

from collectived.bench.operation_kinds import KINDS, BenchOperation
from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import DType, ReduceOp


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """The same on all ranks; `collectived bench` has checked what a user can get wrong.

    Attributes:
        operation: a name of `operation_kinds.KINDS`. dtype: as NumPy spells it. reduce_op, root: where there is one.
        min_bytes, max_bytes, factor, step_bytes: as for `compute_sizes`.
        iterations: timed ones per size; 0: as `choose_iterations` says. warmup: those before, which do not count.
        memory: "worker": inputs lie in arrays from `session.empty`; "own": in ordinary ones.
        in_flight: how many are started before the first is waited for; 0: blocking calls.
        timeout: of each collective, in seconds; 0: none.
        check: whether results are compared with the known answer.
    """

    operation: str
    dtype: str = "float32"
    reduce_op: str = "sum"
    root: int = 0
    min_bytes: int = 4
    max_bytes: int = 64 << 20
    factor: int = 4
    step_bytes: int = 0
    iterations: int = 0
    warmup: int = 10
    memory: str = "worker"
    in_flight: int = 0
    timeout: float = 0.0
    check: bool = True

    @classmethod
    def from_json(cls, text: str) -> BenchConfig:
        """The order in a JSON object.

        Raises:
            ValueError: the text is none, or has keys that an order has not.
        """
        try:
            order = cls(**json.loads(text))
            if order.operation not in KINDS:
                raise ValueError(f"unknown operation {order.operation!r}")
            return order
        except (TypeError, ValueError) as error:
            known = ", ".join(field.name for field in dataclasses.fields(cls))
            raise ValueError(f"{text!r} is no order: {error}; expected a JSON object with keys of {known}") from None

    @property
    def kind(self) -> BenchOperation:
        return KINDS[self.operation]

    @property
    def should_check(self) -> bool:
        """Whether there is something to check, and it is to be checked."""
        return self.check and self.kind.moves_data

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        return to_numpy(DType[self.dtype.upper()])

    @property
    def reduction(self) -> ReduceOp:
        return ReduceOp.of(self.reduce_op)
