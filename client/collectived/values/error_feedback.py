"""Error feedback: what compression has taken from a value is given back with the next one."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from collectived.values import nest
from collectived_proto.types import Compression

T = TypeVar("T")


class ErrorFeedback:
    """Keeps what rounding takes from the values of one rank, and adds it to the next ones.

    Give each rank one for its gradients, and let it compensate every value before that is reduced with the same
    `compression`. Values lost in one step then come with a later one, so that small gradients add up instead of being
    rounded away forever. The values that it gives are compressed without another error where a rank is alone on its
    worker; rounding errors of workers in sums of several ranks are not given back.

    Args:
        compression: `"bfloat16"`, `"float8"` or `"int8"`.

    Raises:
        ValueError: `compression` is unknown, or none.
    """

    def __init__(self, compression: str) -> None:
        self._compression = Compression.of(compression)
        if self._compression is Compression.NONE:
            raise ValueError('error feedback needs a compression: "bfloat16", "float8" or "int8"')
        self._spec: nest.Spec | None = None
        self._lost: list[NDArray[np.float32]] = []

    def compensate(self, value: T) -> T:
        """Return the array to reduce instead of `value`: with what was lost before, rounded as compression rounds it.

        Args:
            value: a nest of NumPy arrays of float32 or bfloat16, of the same structure and shapes every time.

        Returns:
            New arrays of the same structure and types.

        Raises:
            ValueError: the structure or a shape differs from that of the last call: make a new one, or `reset()`.
            TypeError: a leaf is no array of float32 or bfloat16.
        """
        spec, leaves = nest.flatten(value)
        for path, leaf in zip(nest.paths(spec), leaves, strict=True):
            if not isinstance(leaf, np.ndarray) or leaf.dtype.name not in ("float32", "bfloat16"):
                what = leaf.dtype.name if isinstance(leaf, np.ndarray) else type(leaf).__name__
                raise TypeError(
                    f"{path or 'value'} is {what}: error feedback is for NumPy arrays of float32 or bfloat16"
                )
        shapes = [leaf.shape for leaf in leaves]
        if self._spec is None:
            self._spec, self._lost = spec, [np.zeros(shape, np.float32) for shape in shapes]
        elif self._spec != spec or [lost.shape for lost in self._lost] != shapes:
            raise ValueError("the value has another structure or other shapes than before: call reset() first")
        given = []
        for number, leaf in enumerate(leaves):
            wished = leaf.astype(np.float32) + self._lost[number]
            rounded = _round(wished, self._compression).astype(leaf.dtype)
            with np.errstate(invalid="ignore"):
                lost = wished - rounded.astype(np.float32)
            self._lost[number] = np.where(np.isfinite(lost), lost, np.float32(0))
            given.append(rounded)
        result: T = nest.unflatten(spec, given)
        return result

    def reset(self) -> None:
        """Forgets what was lost, as after weights have been loaded or the group has changed."""
        self._spec, self._lost = None, []


def _round(values: NDArray[np.float32], compression: Compression) -> NDArray[np.float32]:
    """As values come out of compression."""
    from collectived_native import core  # without one, all else of the library works

    blocks = np.zeros((-(-values.size // core.BLOCK_VALUES), core.BLOCK_VALUES), np.float32)
    blocks.reshape(-1)[: values.size] = values.reshape(-1)
    compressed = np.empty((len(blocks), core.block_bytes(compression.number)), np.uint8)
    core.compress(compression.number, compressed, blocks)
    core.expand(compression.number, blocks, compressed)
    return blocks.reshape(-1)[: values.size].reshape(values.shape)
