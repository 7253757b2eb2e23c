"""The actions of the coordinator when a timer is due. A timer that no longer applies is ignored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerTimeout:
    task: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class InquiryTimeout:
    query: int


@dataclass(frozen=True, slots=True)
class InquiryRetry:
    query: int


@dataclass(frozen=True, slots=True)
class SettleTimeout:
    """`complete_at`: of the generation that forms, when this was armed."""

    name: str
    complete_at: float


@dataclass(frozen=True, slots=True)
class ProgressTimer:
    name: str


@dataclass(frozen=True, slots=True)
class ReattachTimeout:
    generation: int


@dataclass(frozen=True, slots=True)
class MeasurementTimeout:
    generation: int


@dataclass(frozen=True, slots=True)
class ProposalTimeout:
    """`proposal` 0: time to look again whether one is due."""

    proposal: int
    generation: int


@dataclass(frozen=True, slots=True)
class DrainRetry:
    request: int
    generation: int


@dataclass(frozen=True, slots=True)
class DrainTimeout:
    request: int


Timer = (
    DrainRetry
    | DrainTimeout
    | WorkerTimeout
    | InquiryTimeout
    | InquiryRetry
    | SettleTimeout
    | ProgressTimer
    | ReattachTimeout
    | MeasurementTimeout
    | ProposalTimeout
)
