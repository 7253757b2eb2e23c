"""How values travel between hosts in fewer bytes, and the names under which callers know that."""

from __future__ import annotations

import enum


class Compression(enum.Enum):
    """The format of sums and means of float32 and bfloat16 between workers."""

    NONE = "none"
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    INT8 = "int8"

    @property
    def number(self) -> int:
        """As on the wire and in the native core."""
        return list(Compression).index(self)

    @classmethod
    def of(cls, value: object) -> Compression:
        """The format of that name, in any case.

        Raises:
            ValueError: no format has this name.
        """
        try:
            return value if isinstance(value, Compression) else cls(value.lower() if isinstance(value, str) else value)
        except ValueError:
            names = ", ".join(repr(one.value) for one in cls)
            raise ValueError(f"compression must be None or one of {names}, got {value!r}") from None
