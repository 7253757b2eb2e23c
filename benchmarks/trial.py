"""What a library must show to be measured: a rank of a group that stands, and one call of it on prepared buffers."""

from __future__ import annotations

from typing import Protocol

from benchmarks.cases import Array, Case


class Trial(Protocol):
    """Buffers of one case on one rank. Making it, filling it and looking at results is not measured; `call` is."""

    in_place: bool
    """Whether a call sums what the last call left."""

    def fill(self, base: Array, factor: float) -> None:
        """Puts this rank's contribution into all inputs, and spoils all outputs."""

    def call(self) -> object:
        """Sums once; returns when the result can be used and the inputs may be changed."""

    def results(self) -> list[Array]:
        """What the last call gave."""


class Peer(Protocol):
    """One rank of a library's group."""

    rank: int
    size: int
    versions: dict[str, str]

    def trial(self, case: Case, variant: str) -> Trial:
        """Buffers for `case`. `variant` is where they lie, where a library knows more than one place."""

    def close(self) -> None: ...
