"""What `memory`, `prepare` and `results` share: the base of arrays in worker memory, and where leaves lie in a slot."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import numpy as np

from collectived_proto.types import Layout

Place = tuple[int, np.dtype[Any], tuple[int, ...]]  # byte offset in a slot, dtype, shape


class Backing(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of a slot, as the base of the arrays in it: whoever holds one of those holds the slot.

    It is a subclass because NumPy lets a view of a view skip bases of its own type.
    """

    slot: object = None


class Stageable(Hashable, Protocol):
    """A prepared collective, as far as staging it goes.

    Attributes:
        current: whether more calls of it may come, so that its staging slot is worth keeping.
    """

    current: bool
    layout: Layout
    staging_places: list[Place]
