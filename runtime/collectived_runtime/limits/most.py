"""How much there may be of what clients ask a worker for; 0 is any number."""

from __future__ import annotations

from dataclasses import dataclass

from collectived_runtime.limits.descriptors import WANTED


@dataclass(frozen=True, slots=True)
class Most:
    """sessions: of the worker. ranks, memory: of one session; memory in bytes. groups: with a rank here.

    descriptors: of this process. openings: allocations of a session's own on a GPU; 0: none.
    """

    sessions: int = 0
    ranks: int = 0
    memory: int = 0
    groups: int = 0
    descriptors: int = WANTED
    openings: int = 0
