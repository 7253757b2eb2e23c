"""Element types as NumPy knows them (bfloat16 through ml_dtypes), for those sides that hold arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from collectived_proto.types import DType

_NUMPY: dict[DType, np.dtype[Any]] = {
    kind: np.dtype(ml_dtypes.bfloat16 if kind is DType.BFLOAT16 else kind.label) for kind in DType
}
_DTYPE: dict[np.dtype[Any], DType] = {numpy: kind for kind, numpy in _NUMPY.items()}


def to_numpy(kind: DType) -> np.dtype[Any]:
    """Return the NumPy dtype, little-endian."""
    return _NUMPY[kind]


def from_numpy(dtype: np.dtype[Any]) -> DType | None:
    """The element type, or None where collectives do not carry it. Byte order must be native."""
    return _DTYPE.get(dtype)
