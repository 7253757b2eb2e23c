from collectived_proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ("local_only",)
    LOCAL_ONLY_FIELD_NUMBER: _ClassVar[int]
    local_only: bool
    def __init__(self, local_only: bool = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("unix_time", "coordinator", "workers", "groups", "failures", "warnings", "answered_by")
    UNIX_TIME_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_BY_FIELD_NUMBER: _ClassVar[int]
    unix_time: float
    coordinator: CoordinatorStatus
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    groups: _containers.RepeatedCompositeFieldContainer[GroupStatus]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    answered_by: str
    def __init__(self, unix_time: _Optional[float] = ..., coordinator: _Optional[_Union[CoordinatorStatus, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupStatus, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ..., answered_by: _Optional[str] = ...) -> None: ...

class CoordinatorStatus(_message.Message):
    __slots__ = ("address", "epoch", "pid", "uptime_seconds", "release", "job", "restarted", "insecure", "protocol")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    RESTARTED_FIELD_NUMBER: _ClassVar[int]
    INSECURE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    address: str
    epoch: int
    pid: int
    uptime_seconds: float
    release: str
    job: str
    restarted: bool
    insecure: bool
    protocol: _common_pb2.Protocol
    def __init__(self, address: _Optional[str] = ..., epoch: _Optional[int] = ..., pid: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., release: _Optional[str] = ..., job: _Optional[str] = ..., restarted: bool = ..., insecure: bool = ..., protocol: _Optional[_Union[_common_pb2.Protocol, _Mapping]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("task", "host", "pid", "incarnation", "release", "uptime_seconds", "devices", "address", "link_address", "connected", "last_heartbeat_seconds", "sessions", "arena_bytes", "resident_bytes", "threads", "descriptors", "lanes", "draining", "retained_bytes", "arena_limit_bytes", "client_releases", "gpus_missing", "silent", "limits_met", "insecure", "protocol", "clients", "nccl")
    TASK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LINK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_RELEASES_FIELD_NUMBER: _ClassVar[int]
    GPUS_MISSING_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_MET_FIELD_NUMBER: _ClassVar[int]
    INSECURE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    NCCL_FIELD_NUMBER: _ClassVar[int]
    task: int
    host: str
    pid: int
    incarnation: str
    release: str
    uptime_seconds: float
    devices: _containers.RepeatedScalarFieldContainer[str]
    address: str
    link_address: str
    connected: bool
    last_heartbeat_seconds: float
    sessions: int
    arena_bytes: int
    resident_bytes: int
    threads: int
    descriptors: int
    lanes: _containers.RepeatedCompositeFieldContainer[LaneStatus]
    draining: bool
    retained_bytes: int
    arena_limit_bytes: int
    client_releases: _containers.RepeatedScalarFieldContainer[str]
    gpus_missing: str
    silent: bool
    limits_met: _containers.RepeatedCompositeFieldContainer[LimitMet]
    insecure: bool
    protocol: _common_pb2.Protocol
    clients: _containers.RepeatedCompositeFieldContainer[_common_pb2.Protocol]
    nccl: str
    def __init__(self, task: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., incarnation: _Optional[str] = ..., release: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., devices: _Optional[_Iterable[str]] = ..., address: _Optional[str] = ..., link_address: _Optional[str] = ..., connected: bool = ..., last_heartbeat_seconds: _Optional[float] = ..., sessions: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., threads: _Optional[int] = ..., descriptors: _Optional[int] = ..., lanes: _Optional[_Iterable[_Union[LaneStatus, _Mapping]]] = ..., draining: bool = ..., retained_bytes: _Optional[int] = ..., arena_limit_bytes: _Optional[int] = ..., client_releases: _Optional[_Iterable[str]] = ..., gpus_missing: _Optional[str] = ..., silent: bool = ..., limits_met: _Optional[_Iterable[_Union[LimitMet, _Mapping]]] = ..., insecure: bool = ..., protocol: _Optional[_Union[_common_pb2.Protocol, _Mapping]] = ..., clients: _Optional[_Iterable[_Union[_common_pb2.Protocol, _Mapping]]] = ..., nccl: _Optional[str] = ...) -> None: ...

class LimitMet(_message.Message):
    __slots__ = ("limit", "refused", "last_seconds")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LAST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    limit: str
    refused: int
    last_seconds: float
    def __init__(self, limit: _Optional[str] = ..., refused: _Optional[int] = ..., last_seconds: _Optional[float] = ...) -> None: ...

class LaneStatus(_message.Message):
    __slots__ = ("group", "key", "generation", "ranks", "collectives_done", "collectives_failed", "bytes_reduced", "bytes_sent", "bytes_received", "in_flight", "members", "table", "posts", "notes", "idle", "rates")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_DONE_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FAILED_FIELD_NUMBER: _ClassVar[int]
    BYTES_REDUCED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    POSTS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    group: str
    key: int
    generation: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    collectives_done: int
    collectives_failed: int
    bytes_reduced: int
    bytes_sent: int
    bytes_received: int
    in_flight: _containers.RepeatedCompositeFieldContainer[InFlight]
    members: _containers.RepeatedCompositeFieldContainer[_common_pb2.Member]
    table: _containers.RepeatedCompositeFieldContainer[_common_pb2.Tier]
    posts: _containers.RepeatedCompositeFieldContainer[PostInFlight]
    notes: _containers.RepeatedScalarFieldContainer[str]
    idle: bool
    rates: _containers.RepeatedCompositeFieldContainer[Rate]
    def __init__(self, group: _Optional[str] = ..., key: _Optional[int] = ..., generation: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., collectives_done: _Optional[int] = ..., collectives_failed: _Optional[int] = ..., bytes_reduced: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., in_flight: _Optional[_Iterable[_Union[InFlight, _Mapping]]] = ..., members: _Optional[_Iterable[_Union[_common_pb2.Member, _Mapping]]] = ..., table: _Optional[_Iterable[_Union[_common_pb2.Tier, _Mapping]]] = ..., posts: _Optional[_Iterable[_Union[PostInFlight, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., idle: bool = ..., rates: _Optional[_Iterable[_Union[Rate, _Mapping]]] = ...) -> None: ...

class Rate(_message.Message):
    __slots__ = ("op", "seconds", "collectives", "bytes", "bus_bytes", "busy_seconds", "waiting_seconds", "algorithm_bandwidth", "bus_bandwidth")
    OP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BUS_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    BUS_BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    op: str
    seconds: float
    collectives: int
    bytes: int
    bus_bytes: int
    busy_seconds: float
    waiting_seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    def __init__(self, op: _Optional[str] = ..., seconds: _Optional[float] = ..., collectives: _Optional[int] = ..., bytes: _Optional[int] = ..., bus_bytes: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., waiting_seconds: _Optional[float] = ..., algorithm_bandwidth: _Optional[float] = ..., bus_bandwidth: _Optional[float] = ...) -> None: ...

class InFlight(_message.Message):
    __slots__ = ("instance", "op", "site", "seconds", "arrived", "missing", "bytes", "algorithm", "why", "state", "packs", "packs_done", "shards")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PACKS_FIELD_NUMBER: _ClassVar[int]
    PACKS_DONE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    instance: int
    op: str
    site: str
    seconds: float
    arrived: _containers.RepeatedScalarFieldContainer[int]
    missing: _containers.RepeatedScalarFieldContainer[int]
    bytes: int
    algorithm: str
    why: str
    state: str
    packs: int
    packs_done: int
    shards: int
    def __init__(self, instance: _Optional[int] = ..., op: _Optional[str] = ..., site: _Optional[str] = ..., seconds: _Optional[float] = ..., arrived: _Optional[_Iterable[int]] = ..., missing: _Optional[_Iterable[int]] = ..., bytes: _Optional[int] = ..., algorithm: _Optional[str] = ..., why: _Optional[str] = ..., state: _Optional[str] = ..., packs: _Optional[int] = ..., packs_done: _Optional[int] = ..., shards: _Optional[int] = ...) -> None: ...

class PostInFlight(_message.Message):
    __slots__ = ("rank", "peer", "tag", "op", "site", "seconds", "bytes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    peer: int
    tag: int
    op: str
    site: str
    seconds: float
    bytes: int
    def __init__(self, rank: _Optional[int] = ..., peer: _Optional[int] = ..., tag: _Optional[int] = ..., op: _Optional[str] = ..., site: _Optional[str] = ..., seconds: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...

class GroupStatus(_message.Message):
    __slots__ = ("name", "key", "generation", "state", "size", "members", "left", "collectives_done", "bytes_reduced", "in_flight", "waiting_for", "table", "posts", "notes", "idle", "rates", "collectives_failed", "forming_seconds", "min_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_REDUCED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    POSTS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FAILED_FIELD_NUMBER: _ClassVar[int]
    FORMING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MIN_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    key: int
    generation: int
    state: str
    size: int
    members: _containers.RepeatedCompositeFieldContainer[_common_pb2.Member]
    left: _containers.RepeatedCompositeFieldContainer[_common_pb2.Member]
    collectives_done: int
    bytes_reduced: int
    in_flight: _containers.RepeatedCompositeFieldContainer[InFlight]
    waiting_for: str
    table: _containers.RepeatedCompositeFieldContainer[_common_pb2.Tier]
    posts: _containers.RepeatedCompositeFieldContainer[PostInFlight]
    notes: _containers.RepeatedScalarFieldContainer[str]
    idle: bool
    rates: _containers.RepeatedCompositeFieldContainer[Rate]
    collectives_failed: int
    forming_seconds: float
    min_size: int
    def __init__(self, name: _Optional[str] = ..., key: _Optional[int] = ..., generation: _Optional[int] = ..., state: _Optional[str] = ..., size: _Optional[int] = ..., members: _Optional[_Iterable[_Union[_common_pb2.Member, _Mapping]]] = ..., left: _Optional[_Iterable[_Union[_common_pb2.Member, _Mapping]]] = ..., collectives_done: _Optional[int] = ..., bytes_reduced: _Optional[int] = ..., in_flight: _Optional[_Iterable[_Union[InFlight, _Mapping]]] = ..., waiting_for: _Optional[str] = ..., table: _Optional[_Iterable[_Union[_common_pb2.Tier, _Mapping]]] = ..., posts: _Optional[_Iterable[_Union[PostInFlight, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., idle: bool = ..., rates: _Optional[_Iterable[_Union[Rate, _Mapping]]] = ..., collectives_failed: _Optional[int] = ..., forming_seconds: _Optional[float] = ..., min_size: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("unix_time", "verdict")
    UNIX_TIME_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    unix_time: float
    verdict: _common_pb2.Verdict
    def __init__(self, unix_time: _Optional[float] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("host", "group", "timeout_seconds", "stay", "task")
    HOST_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAY_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    host: str
    group: str
    timeout_seconds: float
    stay: bool
    task: int
    def __init__(self, host: _Optional[str] = ..., group: _Optional[str] = ..., timeout_seconds: _Optional[float] = ..., stay: bool = ..., task: _Optional[int] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("workers", "groups", "cut", "notes", "uncertain")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    UNCERTAIN_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[int]
    groups: _containers.RepeatedScalarFieldContainer[str]
    cut: _containers.RepeatedCompositeFieldContainer[Cut]
    notes: _containers.RepeatedScalarFieldContainer[str]
    uncertain: bool
    def __init__(self, workers: _Optional[_Iterable[int]] = ..., groups: _Optional[_Iterable[str]] = ..., cut: _Optional[_Iterable[_Union[Cut, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., uncertain: bool = ...) -> None: ...

class Cut(_message.Message):
    __slots__ = ("group", "generation", "instance", "op", "site", "worker", "missing")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    group: str
    generation: int
    instance: int
    op: str
    site: str
    worker: int
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[str] = ..., generation: _Optional[int] = ..., instance: _Optional[int] = ..., op: _Optional[str] = ..., site: _Optional[str] = ..., worker: _Optional[int] = ..., missing: _Optional[_Iterable[int]] = ...) -> None: ...
