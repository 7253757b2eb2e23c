"""How much there may be of what clients ask a worker, or a coordinator, for; 0 is any number."""

from __future__ import annotations

from dataclasses import dataclass

from collectived_proto.config.daemons import WorkerSettings
from collectived_runtime.limits.descriptors import TARGET_DESCRIPTORS


@dataclass(frozen=True, slots=True)
class Quotas:
    """sessions: of the worker. ranks, memory: of one session; memory in bytes. groups: with a rank here.

    descriptors: of this process. open_allocations: allocations of a session's own on a GPU; 0: none.
    gpu_memory: of each GPU, of one session; 0: three quarters of what clients may have.
    """

    sessions: int = 0
    ranks: int = 0
    memory: int = 0
    groups: int = 0
    descriptors: int = TARGET_DESCRIPTORS
    open_allocations: int = 0
    gpu_memory: int = 0

    @classmethod
    def from_settings(cls, settings: WorkerSettings, memory: int, descriptors: int) -> Quotas:
        """The quotas of a worker's configuration, whose arenas may take so many bytes."""
        share = settings.max_session_memory or memory * 3 // 4
        return cls(
            settings.max_sessions,
            settings.max_session_ranks,
            share,
            settings.max_groups,
            descriptors,
            settings.max_session_openings,
            settings.max_session_gpu_memory,
        )


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """How many groups may form or run, and how many ranks one may have; 0: any number."""

    groups: int = 0
    ranks: int = 0


NO_LIMITS = GroupLimits()
