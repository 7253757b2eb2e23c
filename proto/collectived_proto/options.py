"""Options of a collective, as tf.distribute names them."""

from __future__ import annotations

import math
import operator
import warnings
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real
from typing import SupportsIndex

from collectived_proto.types import CommunicationImplementation, Compression

MAX_BYTES = (1 << 63) - 1  # that a message can name


def to_seconds(value: float | timedelta | None, name: str) -> float | None:
    """A timeout as float seconds; 0 stays 0 ("none, said explicitly"), None stays None.

    Raises:
        ValueError: negative, NaN or beyond what a float holds.
        TypeError: not a number.
    """
    if value is None:
        return None
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):  # numbers of NumPy, too
        raise TypeError(f"{name} must be seconds or None, got {type(value).__name__}")
    try:
        found = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be seconds that a float can hold, got {value!r}") from None
    if math.isnan(found) or found < 0:
        raise ValueError(f"{name} must not be negative or NaN, got {value!r}")
    return found


def to_byte_count(value: SupportsIndex, name: str) -> int:
    """A number of bytes.

    Raises:
        ValueError: negative, or 2**63 and more.
        TypeError: not a whole number.
    """
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if found < 0:
        raise ValueError(f"{name} must not be negative, got {found}")
    if found > MAX_BYTES:
        raise ValueError(f"{name} must be at most {MAX_BYTES}, got {found}")
    return found


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints and limits for collectives.

    Args:
        bytes_per_pack: a value is sent in packs of about this many bytes, last leaves first, so that their users can
            go on early. 0: chosen automatically.
        timeout_seconds: one deadline for a whole call, counted from the first rank's submission. 0 and None: none.
        implementation: `AUTO`, `RING` or `NCCL`; a string in any case is accepted.
        compression: how sums and means of float32 and bfloat16 travel between hosts: `"bfloat16"`, `"float8"` or
            `"int8"`, of fewer bytes and with an error that `docs/guide/compression.md` bounds. All ranks give the same.
            None: as the group's options say; `"none"`: not compressed, whatever they say.

    Raises:
        ValueError: `bytes_per_pack` is negative or 2**63 and more, `timeout_seconds` is negative or NaN, or
            `implementation` or `compression` is unknown.
        TypeError: `bytes_per_pack` is not a whole number or `timeout_seconds` not a number.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO
    compression: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes_per_pack", to_byte_count(self.bytes_per_pack, "bytes_per_pack"))
        object.__setattr__(self, "timeout_seconds", to_seconds(self.timeout_seconds, "timeout_seconds"))
        object.__setattr__(self, "implementation", _parse_implementation(self.implementation))
        if self.compression is not None:
            object.__setattr__(self, "compression", Compression.of(self.compression).value)

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """These options where `other` chooses nothing: by 0, None or AUTO. A timeout of 0 and `"none"` are choices."""
        if other is None:
            return self
        return CommunicationOptions(
            other.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if other.timeout_seconds is None else other.timeout_seconds,
            self.implementation if other.implementation is CommunicationImplementation.AUTO else other.implementation,
            other.compression or self.compression,
        )


def _parse_implementation(value: object) -> CommunicationImplementation:
    if isinstance(value, CommunicationImplementation):
        return value
    try:
        return CommunicationImplementation(value.upper() if isinstance(value, str) else value)
    except ValueError:
        names = ", ".join(member.value for member in CommunicationImplementation)
        raise ValueError(f"implementation must be one of {names}, got {value!r}") from None


def CollectiveHints(bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> CommunicationOptions:
    """Deprecated name of `CommunicationOptions`."""
    warnings.warn("CollectiveHints is deprecated: use CommunicationOptions", DeprecationWarning, stacklevel=2)
    return CommunicationOptions(bytes_per_pack, timeout_seconds)
