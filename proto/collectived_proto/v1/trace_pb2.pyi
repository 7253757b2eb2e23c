from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TraceRequest(_message.Message):
    __slots__ = ("last_seconds", "group", "local_only", "most_bytes")
    LAST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ONLY_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    last_seconds: float
    group: str
    local_only: bool
    most_bytes: int
    def __init__(self, last_seconds: _Optional[float] = ..., group: _Optional[str] = ..., local_only: bool = ..., most_bytes: _Optional[int] = ...) -> None: ...

class TraceReply(_message.Message):
    __slots__ = ("time", "worker", "silent", "warnings", "last", "answered_by")
    TIME_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_BY_FIELD_NUMBER: _ClassVar[int]
    time: TraceTime
    worker: WorkerTrace
    silent: _containers.RepeatedCompositeFieldContainer[SilentWorker]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    last: bool
    answered_by: str
    def __init__(self, time: _Optional[_Union[TraceTime, _Mapping]] = ..., worker: _Optional[_Union[WorkerTrace, _Mapping]] = ..., silent: _Optional[_Iterable[_Union[SilentWorker, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ..., last: bool = ..., answered_by: _Optional[str] = ...) -> None: ...

class TraceTime(_message.Message):
    __slots__ = ("unix", "monotonic")
    UNIX_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_FIELD_NUMBER: _ClassVar[int]
    unix: float
    monotonic: float
    def __init__(self, unix: _Optional[float] = ..., monotonic: _Optional[float] = ...) -> None: ...

class SilentWorker(_message.Message):
    __slots__ = ("task", "host")
    TASK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    task: int
    host: str
    def __init__(self, task: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class WorkerTrace(_message.Message):
    __slots__ = ("task", "host", "pid", "incarnation", "now", "clock", "lanes", "collectives", "left_out", "last")
    TASK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    task: int
    host: str
    pid: int
    incarnation: str
    now: float
    clock: WorkerClock
    lanes: _containers.RepeatedCompositeFieldContainer[TraceLane]
    collectives: _containers.RepeatedCompositeFieldContainer[TraceCollective]
    left_out: int
    last: bool
    def __init__(self, task: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., incarnation: _Optional[str] = ..., now: _Optional[float] = ..., clock: _Optional[_Union[WorkerClock, _Mapping]] = ..., lanes: _Optional[_Iterable[_Union[TraceLane, _Mapping]]] = ..., collectives: _Optional[_Iterable[_Union[TraceCollective, _Mapping]]] = ..., left_out: _Optional[int] = ..., last: bool = ...) -> None: ...

class WorkerClock(_message.Message):
    __slots__ = ("offset_seconds", "error_seconds", "round_trip_seconds", "how")
    OFFSET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    offset_seconds: float
    error_seconds: float
    round_trip_seconds: float
    how: str
    def __init__(self, offset_seconds: _Optional[float] = ..., error_seconds: _Optional[float] = ..., round_trip_seconds: _Optional[float] = ..., how: _Optional[str] = ...) -> None: ...

class TraceLane(_message.Message):
    __slots__ = ("group", "key", "size", "ranks", "tasks", "living", "generation", "standings", "places")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    LIVING_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STANDINGS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    group: str
    key: int
    size: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    tasks: _containers.RepeatedScalarFieldContainer[int]
    living: bool
    generation: int
    standings: _containers.RepeatedCompositeFieldContainer[TraceRank]
    places: _containers.RepeatedCompositeFieldContainer[TracePlace]
    def __init__(self, group: _Optional[str] = ..., key: _Optional[int] = ..., size: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., tasks: _Optional[_Iterable[int]] = ..., living: bool = ..., generation: _Optional[int] = ..., standings: _Optional[_Iterable[_Union[TraceRank, _Mapping]]] = ..., places: _Optional[_Iterable[_Union[TracePlace, _Mapping]]] = ...) -> None: ...

class TracePlace(_message.Message):
    __slots__ = ("task", "ranks")
    TASK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    task: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, task: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class TraceRank(_message.Message):
    __slots__ = ("rank", "submitted", "finished", "last_op", "last_site", "active_at", "gone", "host", "pid", "label")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LAST_OP_FIELD_NUMBER: _ClassVar[int]
    LAST_SITE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_AT_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    rank: int
    submitted: int
    finished: int
    last_op: str
    last_site: str
    active_at: float
    gone: bool
    host: str
    pid: int
    label: str
    def __init__(self, rank: _Optional[int] = ..., submitted: _Optional[int] = ..., finished: _Optional[int] = ..., last_op: _Optional[str] = ..., last_site: _Optional[str] = ..., active_at: _Optional[float] = ..., gone: bool = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., label: _Optional[str] = ...) -> None: ...

class TraceCollective(_message.Message):
    __slots__ = ("lane", "generation", "instance", "op", "bytes", "algorithm", "packs", "shards", "arrivals", "started", "ended", "marks", "traffic", "code", "message", "missing", "peer", "waits_for")
    LANE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    PACKS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    lane: int
    generation: int
    instance: int
    op: str
    bytes: int
    algorithm: str
    packs: int
    shards: int
    arrivals: _containers.RepeatedCompositeFieldContainer[TraceArrival]
    started: float
    ended: float
    marks: _containers.RepeatedCompositeFieldContainer[TraceMark]
    traffic: _containers.RepeatedCompositeFieldContainer[TraceTraffic]
    code: int
    message: str
    missing: _containers.RepeatedScalarFieldContainer[int]
    peer: int
    waits_for: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lane: _Optional[int] = ..., generation: _Optional[int] = ..., instance: _Optional[int] = ..., op: _Optional[str] = ..., bytes: _Optional[int] = ..., algorithm: _Optional[str] = ..., packs: _Optional[int] = ..., shards: _Optional[int] = ..., arrivals: _Optional[_Iterable[_Union[TraceArrival, _Mapping]]] = ..., started: _Optional[float] = ..., ended: _Optional[float] = ..., marks: _Optional[_Iterable[_Union[TraceMark, _Mapping]]] = ..., traffic: _Optional[_Iterable[_Union[TraceTraffic, _Mapping]]] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., missing: _Optional[_Iterable[int]] = ..., peer: _Optional[int] = ..., waits_for: _Optional[_Iterable[int]] = ...) -> None: ...

class TraceArrival(_message.Message):
    __slots__ = ("rank", "at", "site")
    RANK_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    at: float
    site: str
    def __init__(self, rank: _Optional[int] = ..., at: _Optional[float] = ..., site: _Optional[str] = ...) -> None: ...

class TraceMark(_message.Message):
    __slots__ = ("kind", "pack", "shard", "round", "task", "begin", "end")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[TraceMark.Kind]
        STRAND: _ClassVar[TraceMark.Kind]
        FOLD: _ClassVar[TraceMark.Kind]
        SEND: _ClassVar[TraceMark.Kind]
        RECEIVE: _ClassVar[TraceMark.Kind]
        PRELUDE: _ClassVar[TraceMark.Kind]
    KIND_UNSPECIFIED: TraceMark.Kind
    STRAND: TraceMark.Kind
    FOLD: TraceMark.Kind
    SEND: TraceMark.Kind
    RECEIVE: TraceMark.Kind
    PRELUDE: TraceMark.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    PACK_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    kind: TraceMark.Kind
    pack: int
    shard: int
    round: int
    task: int
    begin: float
    end: float
    def __init__(self, kind: _Optional[_Union[TraceMark.Kind, str]] = ..., pack: _Optional[int] = ..., shard: _Optional[int] = ..., round: _Optional[int] = ..., task: _Optional[int] = ..., begin: _Optional[float] = ..., end: _Optional[float] = ...) -> None: ...

class TraceTraffic(_message.Message):
    __slots__ = ("task", "sent", "received")
    TASK_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    task: int
    sent: int
    received: int
    def __init__(self, task: _Optional[int] = ..., sent: _Optional[int] = ..., received: _Optional[int] = ...) -> None: ...
