"""Reduce ops, and the names under which callers know them."""

from __future__ import annotations

import enum


class ReduceOp(enum.Enum):
    """How the contributions of all ranks are combined, element by element."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    @classmethod
    def of(cls, value: object, call: str = "all_reduce") -> ReduceOp:
        """The operation of that name in any case; `prod`, `avg` and `average` are understood too.

        Those of torch.distributed, tf.distribute and mpi4py are taken by their names.

        Args:
            call: the collective that takes it, for the message.

        Raises:
            ValueError: the name is not one of the above.
            TypeError: neither a `ReduceOp` nor a string.
        """
        if isinstance(value, ReduceOp):
            return value
        name = _foreign_name(value) if type(value).__name__ in _FOREIGN else value
        if not isinstance(name, str):
            raise TypeError(
                f"expected a reduce op such as 'sum' or ReduceOp.MEAN, got {type(value).__name__}; "
                f'the reduce op comes first: {call}("sum", tensor)'
            )
        name = name.lower()
        try:
            return cls(_SPELLINGS.get(name, name))
        except ValueError:
            raise ValueError(
                f"unknown reduce op {value!r}: expected one of {', '.join(op.value for op in cls)}"
            ) from None


_SPELLINGS = {"prod": "product", "avg": "mean", "average": "mean"}
_FOREIGN = ("ReduceOp", "RedOpType", "Op")  # classes of tf.distribute, torch.distributed (two) and mpi4py


def _foreign_name(value: object) -> str | None:
    """`SUM` of an operation of another library; None where it has no name."""
    name = getattr(value, "name", None)
    return name.removeprefix("MPI_") if isinstance(name, str) else None
