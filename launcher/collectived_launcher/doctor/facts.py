"""The facts that doctor judges: plain values, gathered by `probes`, or made up by a test.

A part that could not be looked at is `UnknownFact`. None stands for "no limit", "not there" or "cannot be known", as
its field says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class UnknownFact:
    """Why a part could not be looked at."""

    why: str


@dataclass(frozen=True, slots=True)
class Library:
    """`installed`: its version, None where it is missing. `wanted`: such as `>=6.31.1,<8`."""

    name: str
    installed: str | None
    wanted: str


@dataclass(frozen=True, slots=True)
class Software:
    """`cannot_load`: the last words of a Python that loaded all that a daemon loads; '' where it could. `slow_to_load`:
    it had not ended after so many seconds; 0 where it had."""

    release: str
    python: str
    wanted_python: str
    libraries: tuple[Library, ...]
    extras: tuple[str, ...] = ()
    cannot_load: str = ""
    slow_to_load: float = 0.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """The abilities that this kernel gives to processes of this user.

    The last four: '' where it works, else the error.
    """

    system: str
    release: str
    memfd: str = ""
    pidfd: str = ""
    peer_pidfd: str = ""
    seqpacket: str = ""


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """In pieces and bytes; None is no limit. `tasks_left`: processes and threads that may still be started."""

    descriptors: int | None
    descriptors_most: int | None
    locked: int | None
    tasks_left: int | None


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes. `limit`: of the narrowest control group around us; `seen_limit`: of those that a worker looks at."""

    total: int
    available: int
    limit: int | None = None
    seen_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Folder:
    """Where sockets lie. `owner`, `mode`: None while it is not there; then `parent_writable` counts."""

    path: str
    owner: int | None
    mode: int | None
    is_directory: bool
    parent_writable: bool
    user: int
    longest_socket: int


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate that the environment or the daemons' file names.

    `days_left`: None where it is not known; `trouble`: why it cannot be used.
    """

    named_by: str
    path: str
    days_left: int | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    index: int
    name: str
    uuid: str
    memory: int


@dataclass(frozen=True, slots=True)
class Gpus:
    """`cards`: NVIDIA devices on the PCI bus. `trouble`: why the driver does not answer. `chosen`: the value of
    CUDA_VISIBLE_DEVICES, None where it is not set. `rdma`: names of InfiniBand or RoCE devices."""

    cards: int = 0
    driver: str = ""
    cuda: str = ""
    devices: tuple[GpuFacts, ...] = ()
    trouble: str = ""
    chosen: str | None = None
    rdma: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NcclFacts:
    """`wanted`: the value of COLLECTIVED_NCCL. `bindings`: version of each that is installed. `version`: of libnccl."""

    wanted: str = ""
    bindings: Mapping[str, str] = field(default_factory=dict)
    version: str = ""


@dataclass(frozen=True, slots=True)
class InterfaceFacts:
    """One address of an interface that is up. `speed` in megabits per second, None where it is not known."""

    name: str
    address: str
    speed: int | None = None


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """`outward`: the address from which packets leave for other networks; '' where there is no way."""

    hostname: str
    interfaces: tuple[InterfaceFacts, ...]
    outward: str = ""
    reached_at: str = ""


@dataclass(frozen=True, slots=True)
class Port:
    """`holder`: the process that listens there, '' for one that is hidden from this user, None for none.

    `ours`: it is a collectived daemon.
    """

    number: int
    used_for: str
    holder: str | None = None
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Clock:
    """`kept`: whether a time service keeps it; None where the kernel does not say."""

    kept: bool | None


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that was asked. `releases`: of its daemons and clients, by name. `ahead`: seconds that its clock is ahead
    of this host's, known to half of `round_trip`. `missing`: what its answer lacks. `trouble`: why it did not
    answer."""

    name: str
    releases: Mapping[str, str] = field(default_factory=dict)
    ahead: float = 0.0
    round_trip: float = 0.0
    missing: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Environment:
    """`variables`: those of collectived and torchrun; "(set)" in place of values that may be secret. `worker_is_there`:
    whether the socket that COLLECTIVED_WORKER names exists; None where it names none."""

    variables: Mapping[str, str]
    worker_is_there: bool | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known about this host and what runs on it."""

    software: Software | UnknownFact
    kernel: Kernel | UnknownFact
    limits: LimitFacts | UnknownFact
    memory: MemoryFacts | UnknownFact
    folder: Folder | UnknownFact
    environment: Environment | UnknownFact
    certificates: tuple[Certificate, ...] | UnknownFact
    gpus: Gpus | UnknownFact
    nccl: NcclFacts | UnknownFact
    network: NetworkFacts | UnknownFact
    ports: tuple[Port, ...] | UnknownFact
    clock: Clock | UnknownFact
    jobs: tuple[RunningJob, ...] | UnknownFact


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """The description of another host that it sends when it is measured."""

    hostname: str
    release: str
    python: str
    libraries: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PathMeasurement:
    """The result of one measuring session, in bytes and seconds.

    `ahead`: of the peer's clock. `interface`: the one that reached it. `trouble`: why there was none; `refused`:
    because the server has another token.
    """

    address: str
    peer: PeerFacts | None = None
    round_trip: float = 0.0
    ahead: float = 0.0
    sent_per_second: float = 0.0
    received_per_second: float = 0.0
    interface: InterfaceFacts | None = None
    trouble: str = ""
    refused: bool = False
