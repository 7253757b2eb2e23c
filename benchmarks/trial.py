"""The interface of a library that is measured: a rank of a group, and one call of it on prepared buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from benchmarks.cases import Array, Case, fill


class Trial(Protocol):
    """Buffers of one case on one rank. Making it, filling it and looking at results is not measured; `call` is."""

    in_place: bool
    """Whether a call sums what the last call left."""

    def fill(self, base: Array, factor: float) -> None:
        """Puts this rank's contribution into all inputs, and spoils all outputs."""

    @property
    def call(self) -> Callable[[], object]:
        """Carries the operation out once; returns when the result can be used and the inputs may be changed."""

    def results(self) -> list[Array]:
        """The result of the last call."""


class Arrays:
    """Ordinary arrays. A broadcast, and what sums in place, has the same ones in and out."""

    call: Callable[[], object]

    def __init__(
        self, case: Case, rank: int, ranks: int, *, in_place: bool = False, empty: Callable[..., Any] = np.empty
    ) -> None:
        gives, gets = case.counts(rank, ranks)
        self.in_place = in_place
        self._rank = rank
        self._receives_only = case.operation == "broadcast" and rank != 0
        self.inputs: list[Array] = [empty(gives, np.float32) for _ in range(case.tensors)]
        self.outputs = self.inputs
        if not in_place and case.operation != "broadcast":
            self.outputs = [np.empty(gets, np.float32) for _ in range(case.tensors)]

    def fill(self, base: Array, factor: float) -> None:
        for array in self.outputs:
            array.fill(np.nan)
        if not self._receives_only:
            for array in self.inputs:
                fill(array, base, self._rank, factor)

    def results(self) -> list[Array]:
        return self.outputs


def make_exchange(rank: int, send: Callable[[], object], receive: Callable[[], object]) -> Callable[[], None]:
    """The part of a rank in `send_recv` with the rank beside it: the even one sends first."""

    def exchange() -> None:
        for step in (receive, send) if rank % 2 else (send, receive):
            step()

    return exchange


class Peer(Protocol):
    """One rank of a library's group."""

    rank: int
    size: int
    versions: dict[str, str]

    def trial(self, case: Case, variant: str) -> Trial:
        """Buffers for `case`. `variant` is where they lie, where a library knows more than one place."""

    def close(self) -> None: ...
