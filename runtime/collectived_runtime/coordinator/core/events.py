"""The events and effects of the coordinator's core, as frozen values.

An *event* is something that happened: a worker came, went or spoke, or time passed. An *effect* is something the shell
is to do about it: send a *message* to a worker, write a log line, break a stream, end the process. Messages are values
of the contract (`Verdict`) or of this file; `codec.py` turns them to protobuf and back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from collectived_proto.errors import Code
from collectived_proto.types import GroupInfo, Peer, RankPosition, Report, Tier, Verdict
from collectived_proto.version import FIRST_VERSIONS, OUR_VERSIONS, VersionRange

Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class AttachedGroup:
    """A group that runs on a worker as it (re-)attaches: its local ranks and the verdicts that it has received."""

    group: GroupInfo
    ranks: tuple[int, ...]
    verdicts: tuple[Verdict, ...] = ()
    idle: bool = False


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """ "I am task 3 of this cluster." """

    task: int
    incarnation: str
    host: str
    pid: int
    devices: tuple[str, ...] = ()
    address: str = ""
    link_address: str = ""
    highest_epoch: int = 0
    draining: bool = False
    versions: VersionRange = FIRST_VERSIONS
    link_secret: str = field(default="", repr=False)  # that a coordinator has given it
    nccl: int = 0
    clock: str = ""  # equal names are one machine
    processors: int = 0  # that it may use; 0: not known
    machine_processors: int = 0

    def __str__(self) -> str:
        return f"worker {self.task} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True, slots=True)
class JoinAsk:
    """One rank-to-be. `name` is scoped (`job/name` or `/name`); a repeated `request` is the same ask."""

    request: str
    name: str
    min_size: int
    max_size: int
    settle_seconds: float = 0.0
    rank: int | None = None
    device: str = ""
    host: str = ""
    pid: int = 0
    label: str = ""
    last_instance: int = -1  # that this process has finished in an earlier generation of the group
    idle: bool = False


# Events


@dataclass(frozen=True, slots=True)
class WorkerAttached:
    """A worker is here, or back.

    Attributes:
        clock: milliseconds since 1970, as this coordinator's host has it; 0: not known.
        groups: those that run on it.
        generations: of these groups.
    """

    hello: WorkerHello
    clock: int = 0
    groups: Iterable[AttachedGroup] = ()
    generations: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class WorkerDetached:
    """A worker's stream has ended; `orderly` when it said goodbye before, and the `goodbye_reason` if it gave one."""

    task: int
    incarnation: str
    reason: str
    orderly: bool = False
    goodbye_reason: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat: the ranks that have moved, by generation; with `more`, not all of them."""

    task: int
    progress: tuple[tuple[int, tuple[RankPosition, ...]], ...] = ()
    more: bool = False


@dataclass(frozen=True, slots=True)
class JoinAsked:
    task: int
    ask: JoinAsk


@dataclass(frozen=True, slots=True)
class JoinCancelled:
    task: int
    request: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FaultReported:
    task: int
    report: Report


@dataclass(frozen=True, slots=True)
class QueryAnswered:
    """The answer to a `PositionQuery`."""

    task: int
    query: int
    positions: tuple[RankPosition, ...]


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """The answer to a `MeasureLink`: one-way latency and bandwidth of a link; or `text`, why there is none."""

    task: int
    generation: int
    peer: int
    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0
    text: str = ""

    @property
    def is_valid(self) -> bool:
        """Whether these are numbers that a link can have."""
        return 0 <= self.latency_seconds < math.inf and 0 < self.bytes_per_second < math.inf

    def __str__(self) -> str:
        return f"{self.latency_seconds!r} s and {self.bytes_per_second!r} bytes/s"


@dataclass(frozen=True, slots=True)
class Promised:
    """A worker starts nothing from this instance on until it gets the number of newcomers."""

    task: int
    proposal: int
    from_instance: int
    next_instance: int = 0  # the first one that no rank there has submitted


@dataclass(frozen=True, slots=True)
class AbandonedCollective:
    """A collective that had begun and did not finish before a drain was over; instance -1: a send or recv."""

    generation: int
    instance: int
    op: str = ""
    site: str = ""
    worker: int = 0
    missing: tuple[int, ...] = ()
    group: str = ""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A request to drain this worker, all workers of a host, or a group; `request` names it in the answer."""

    request: int
    timeout_seconds: float
    task: int = -1
    host: str = ""
    group: str = ""
    stay: bool = False


@dataclass(frozen=True, slots=True)
class WorkerDrained:
    """A worker has done what a `DrainOrder` said."""

    task: int
    request: int
    abandoned: tuple[AbandonedCollective, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """The time named by `next_deadline` has come."""


Event = (
    WorkerAttached
    | WorkerDetached
    | Heartbeat
    | JoinAsked
    | JoinCancelled
    | FaultReported
    | QueryAnswered
    | LinkMeasured
    | Promised
    | DrainRequested
    | WorkerDrained
    | Tick
)


# Messages to workers


@dataclass(frozen=True, slots=True)
class Welcome:
    epoch: int
    heartbeat_seconds: float
    stall_seconds: float
    link_secret: str = field(default="", repr=False)
    versions: VersionRange = OUR_VERSIONS


@dataclass(frozen=True, slots=True)
class JoinUpdate:
    request: str
    present: int
    expected: int
    text: str


@dataclass(frozen=True, slots=True)
class JoinDone:
    request: str
    group: GroupInfo
    rank: int
    peers: tuple[Peer, ...]
    table: tuple[Tier, ...] = ()
    idle: bool = False


@dataclass(frozen=True, slots=True)
class JoinRefused:
    request: str
    code: Code
    message: str


@dataclass(frozen=True, slots=True)
class PositionQuery:
    """ "How far are your ranks at this instance?" """

    key: int
    generation: int
    instance: int
    query: int


@dataclass(frozen=True, slots=True)
class MeasureLink:
    """ "What is your link to this worker like?" Asked before the generation starts."""

    generation: int
    peer: int
    link_address: str


@dataclass(frozen=True, slots=True)
class Propose:
    """ "Promise to start nothing from some instance on, and answer with that instance." """

    key: int
    generation: int
    proposal: int


@dataclass(frozen=True, slots=True)
class WaitingCount:
    """So many wait to join, from that instance on; -1: nothing was agreed, go on."""

    key: int
    generation: int
    proposal: int
    from_instance: int
    waiting: int


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """ "Report when nothing runs any more in these generations." `leave`: it is about that whole worker."""

    request: int
    timeout_seconds: float
    generations: tuple[int, ...]
    leave: bool
    stay: bool


Message = (
    DrainOrder
    | Welcome
    | JoinUpdate
    | JoinDone
    | JoinRefused
    | PositionQuery
    | MeasureLink
    | Verdict
    | Propose
    | WaitingCount
)


# Effects


@dataclass(frozen=True, slots=True)
class SendToWorker:
    task: int
    message: Message


@dataclass(frozen=True, slots=True)
class Log:
    """A line of the log; `verdict` where it reports a failure."""

    level: Level
    text: str
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Break the stream of this incarnation of a worker; as the answer to an attach: refuse it."""

    task: int
    incarnation: str
    code: Code
    reason: str


@dataclass(frozen=True, slots=True)
class SaveTable:
    """Keep the table of links that were measured, for later runs of groups of that name and shape."""

    name: str
    table: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """This coordinator must end itself: a later one is obeyed."""

    reason: str


@dataclass(frozen=True, slots=True)
class DrainDone:
    """The outcome of a drain; `error`: there was no worker or group to drain."""

    request: int
    workers: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()
    abandoned: tuple[AbandonedCollective, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = ""


Effect = SendToWorker | Log | Disconnect | SaveTable | Shutdown | DrainDone
