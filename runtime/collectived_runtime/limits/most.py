"""How much there may be of what clients ask a worker for; 0 is any number."""

from __future__ import annotations

from dataclasses import dataclass

from collectived_runtime.limits.descriptors import WANTED


@dataclass(frozen=True, slots=True)
class Most:
    """sessions: of the worker. ranks, memory: of one session; memory in bytes. groups: with a rank here.

    descriptors: of this process. gpu_memory: of each GPU, of one session; 0: three quarters of what clients may have.
    """

    sessions: int = 0
    ranks: int = 0
    memory: int = 0
    groups: int = 0
    descriptors: int = WANTED
    gpu_memory: int = 0
