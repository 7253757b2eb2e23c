"""Options of a collective, as tf.distribute names them."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from datetime import timedelta

from collectived_proto.types import CommunicationImplementation


def seconds(value: float | timedelta | None, name: str) -> float | None:
    """A timeout as float seconds; 0 stays 0 ("none, said explicitly"), None stays None.

    Raises:
        ValueError: negative or NaN.
        TypeError: not a number.
    """
    if value is None:
        return None
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be seconds or None, got {type(value).__name__}")
    if math.isnan(value) or value < 0:
        raise ValueError(f"{name} must not be negative or NaN, got {value!r}")
    return float(value)


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints and limits for collectives.

    Args:
        bytes_per_pack: a value is sent in packs of about this many bytes, last leaves first, so that their users can
            go on early. 0: chosen automatically.
        timeout_seconds: one deadline for a whole call, counted from the first rank's submission. 0 and None: none.
        implementation: `AUTO`, `RING` or `NCCL`; a string in any case is accepted.

    Raises:
        ValueError: `bytes_per_pack` is negative, `timeout_seconds` is negative or NaN, or `implementation` is unknown.
        TypeError: `bytes_per_pack` is not an int or `timeout_seconds` not a number.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if isinstance(self.bytes_per_pack, bool) or not isinstance(self.bytes_per_pack, int):
            raise TypeError(f"bytes_per_pack must be an int, got {type(self.bytes_per_pack).__name__}")
        if self.bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must not be negative, got {self.bytes_per_pack}")
        object.__setattr__(self, "timeout_seconds", seconds(self.timeout_seconds, "timeout_seconds"))
        object.__setattr__(self, "implementation", _implementation(self.implementation))

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """These options where `other` says nothing: 0, None and AUTO say nothing, a timeout of 0 says "none"."""
        if other is None:
            return self
        return CommunicationOptions(
            other.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if other.timeout_seconds is None else other.timeout_seconds,
            self.implementation if other.implementation is CommunicationImplementation.AUTO else other.implementation,
        )


def _implementation(value: object) -> CommunicationImplementation:
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
