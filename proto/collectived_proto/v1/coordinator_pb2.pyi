from collectived_proto.v1 import common_pb2 as _common_pb2
from collectived_proto.v1 import status_pb2 as _status_pb2
from collectived_proto.v1 import trace_pb2 as _trace_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "join", "join_cancel", "report", "position", "inspection", "goodbye", "measured", "promised", "drained", "trace_part")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    JOIN_CANCEL_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    INSPECTION_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    TRACE_PART_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    join: JoinAsk
    join_cancel: JoinCancel
    report: Report
    position: Position
    inspection: Inspection
    goodbye: Goodbye
    measured: Measured
    promised: Promised
    drained: Drained
    trace_part: TracePart
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., join: _Optional[_Union[JoinAsk, _Mapping]] = ..., join_cancel: _Optional[_Union[JoinCancel, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., inspection: _Optional[_Union[Inspection, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., promised: _Optional[_Union[Promised, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., trace_part: _Optional[_Union[TracePart, _Mapping]] = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("welcome", "join_update", "join_done", "join_refused", "verdict", "query", "inspect", "measure", "propose", "newcomers", "drain", "ask_trace", "echo")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    JOIN_UPDATE_FIELD_NUMBER: _ClassVar[int]
    JOIN_DONE_FIELD_NUMBER: _ClassVar[int]
    JOIN_REFUSED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    INSPECT_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    NEWCOMERS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ASK_TRACE_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    join_update: JoinUpdate
    join_done: JoinDone
    join_refused: JoinRefused
    verdict: _common_pb2.Verdict
    query: Query
    inspect: Inspect
    measure: Measure
    propose: Propose
    newcomers: Newcomers
    drain: DrainOrder
    ask_trace: AskTrace
    echo: Echo
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., join_update: _Optional[_Union[JoinUpdate, _Mapping]] = ..., join_done: _Optional[_Union[JoinDone, _Mapping]] = ..., join_refused: _Optional[_Union[JoinRefused, _Mapping]] = ..., verdict: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., inspect: _Optional[_Union[Inspect, _Mapping]] = ..., measure: _Optional[_Union[Measure, _Mapping]] = ..., propose: _Optional[_Union[Propose, _Mapping]] = ..., newcomers: _Optional[_Union[Newcomers, _Mapping]] = ..., drain: _Optional[_Union[DrainOrder, _Mapping]] = ..., ask_trace: _Optional[_Union[AskTrace, _Mapping]] = ..., echo: _Optional[_Union[Echo, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "task", "incarnation", "host", "pid", "devices", "address", "link_address", "highest_epoch", "groups", "draining", "clock", "processors", "machine_processors", "nccl", "link_secret")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LINK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_PROCESSORS_FIELD_NUMBER: _ClassVar[int]
    NCCL_FIELD_NUMBER: _ClassVar[int]
    LINK_SECRET_FIELD_NUMBER: _ClassVar[int]
    protocol: _common_pb2.Protocol
    task: int
    incarnation: str
    host: str
    pid: int
    devices: _containers.RepeatedScalarFieldContainer[str]
    address: str
    link_address: str
    highest_epoch: int
    groups: _containers.RepeatedCompositeFieldContainer[Attached]
    draining: bool
    clock: str
    processors: int
    machine_processors: int
    nccl: int
    link_secret: str
    def __init__(self, protocol: _Optional[_Union[_common_pb2.Protocol, _Mapping]] = ..., task: _Optional[int] = ..., incarnation: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., devices: _Optional[_Iterable[str]] = ..., address: _Optional[str] = ..., link_address: _Optional[str] = ..., highest_epoch: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Attached, _Mapping]]] = ..., draining: bool = ..., clock: _Optional[str] = ..., processors: _Optional[int] = ..., machine_processors: _Optional[int] = ..., nccl: _Optional[int] = ..., link_secret: _Optional[str] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("group", "ranks", "verdicts", "idle")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    group: _common_pb2.Group
    ranks: _containers.RepeatedScalarFieldContainer[int]
    verdicts: _containers.RepeatedCompositeFieldContainer[_common_pb2.Verdict]
    idle: bool
    def __init__(self, group: _Optional[_Union[_common_pb2.Group, _Mapping]] = ..., ranks: _Optional[_Iterable[int]] = ..., verdicts: _Optional[_Iterable[_Union[_common_pb2.Verdict, _Mapping]]] = ..., idle: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "heartbeat_seconds", "stall_seconds", "protocol", "link_secret")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LINK_SECRET_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    heartbeat_seconds: float
    stall_seconds: float
    protocol: _common_pb2.Protocol
    link_secret: str
    def __init__(self, epoch: _Optional[int] = ..., heartbeat_seconds: _Optional[float] = ..., stall_seconds: _Optional[float] = ..., protocol: _Optional[_Union[_common_pb2.Protocol, _Mapping]] = ..., link_secret: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("standings", "more", "sent_at", "clock")
    STANDINGS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    standings: _containers.RepeatedCompositeFieldContainer[Standings]
    more: bool
    sent_at: float
    clock: _trace_pb2.WorkerClock
    def __init__(self, standings: _Optional[_Iterable[_Union[Standings, _Mapping]]] = ..., more: bool = ..., sent_at: _Optional[float] = ..., clock: _Optional[_Union[_trace_pb2.WorkerClock, _Mapping]] = ...) -> None: ...

class Echo(_message.Message):
    __slots__ = ("sent_at", "at")
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    sent_at: float
    at: float
    def __init__(self, sent_at: _Optional[float] = ..., at: _Optional[float] = ...) -> None: ...

class Standings(_message.Message):
    __slots__ = ("generation", "ranks")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankPosition]
    def __init__(self, generation: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankPosition, _Mapping]]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...

class JoinAsk(_message.Message):
    __slots__ = ("request", "name", "min_size", "max_size", "settle_seconds", "rank", "device", "host", "pid", "label", "last_instance", "idle")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MIN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SIZE_FIELD_NUMBER: _ClassVar[int]
    SETTLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    LAST_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    request: str
    name: str
    min_size: int
    max_size: int
    settle_seconds: float
    rank: int
    device: str
    host: str
    pid: int
    label: str
    last_instance: int
    idle: bool
    def __init__(self, request: _Optional[str] = ..., name: _Optional[str] = ..., min_size: _Optional[int] = ..., max_size: _Optional[int] = ..., settle_seconds: _Optional[float] = ..., rank: _Optional[int] = ..., device: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., label: _Optional[str] = ..., last_instance: _Optional[int] = ..., idle: bool = ...) -> None: ...

class JoinCancel(_message.Message):
    __slots__ = ("request", "reason")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request: str
    reason: str
    def __init__(self, request: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class JoinUpdate(_message.Message):
    __slots__ = ("request", "present", "expected", "text")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    request: str
    present: int
    expected: int
    text: str
    def __init__(self, request: _Optional[str] = ..., present: _Optional[int] = ..., expected: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class JoinDone(_message.Message):
    __slots__ = ("request", "rank", "formed")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FORMED_FIELD_NUMBER: _ClassVar[int]
    request: str
    rank: int
    formed: bytes
    def __init__(self, request: _Optional[str] = ..., rank: _Optional[int] = ..., formed: _Optional[bytes] = ...) -> None: ...

class Formed(_message.Message):
    __slots__ = ("group", "peers", "table", "idle")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    group: _common_pb2.Group
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    table: _containers.RepeatedCompositeFieldContainer[_common_pb2.Tier]
    idle: bool
    def __init__(self, group: _Optional[_Union[_common_pb2.Group, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., table: _Optional[_Iterable[_Union[_common_pb2.Tier, _Mapping]]] = ..., idle: bool = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("task", "incarnation", "host", "link_address", "ranks", "nccl")
    TASK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    LINK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NCCL_FIELD_NUMBER: _ClassVar[int]
    task: int
    incarnation: str
    host: str
    link_address: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    nccl: int
    def __init__(self, task: _Optional[int] = ..., incarnation: _Optional[str] = ..., host: _Optional[str] = ..., link_address: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., nccl: _Optional[int] = ...) -> None: ...

class Measure(_message.Message):
    __slots__ = ("generation", "peer", "link_address")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    LINK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    peer: int
    link_address: str
    def __init__(self, generation: _Optional[int] = ..., peer: _Optional[int] = ..., link_address: _Optional[str] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("generation", "peer", "latency_seconds", "bytes_per_second", "text")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    peer: int
    latency_seconds: float
    bytes_per_second: float
    text: str
    def __init__(self, generation: _Optional[int] = ..., peer: _Optional[int] = ..., latency_seconds: _Optional[float] = ..., bytes_per_second: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class JoinRefused(_message.Message):
    __slots__ = ("request", "code", "message")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request: str
    code: int
    message: str
    def __init__(self, request: _Optional[str] = ..., code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("key", "generation", "kind", "instance", "rank", "worker", "text", "timeout_seconds", "ranks", "peer", "last", "cause")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Report.Kind]
        PENDING: _ClassVar[Report.Kind]
        EXPIRED: _ClassVar[Report.Kind]
        MISMATCH: _ClassVar[Report.Kind]
        LOST: _ClassVar[Report.Kind]
        ABORT: _ClassVar[Report.Kind]
        LINK: _ClassVar[Report.Kind]
        LEFT: _ClassVar[Report.Kind]
        EXHAUSTED: _ClassVar[Report.Kind]
        RESUMED: _ClassVar[Report.Kind]
        OVERDUE: _ClassVar[Report.Kind]
        UNANSWERED: _ClassVar[Report.Kind]
        UNCLAIMED: _ClassVar[Report.Kind]
        NATIVE: _ClassVar[Report.Kind]
        NEAR: _ClassVar[Report.Kind]
    KIND_UNSPECIFIED: Report.Kind
    PENDING: Report.Kind
    EXPIRED: Report.Kind
    MISMATCH: Report.Kind
    LOST: Report.Kind
    ABORT: Report.Kind
    LINK: Report.Kind
    LEFT: Report.Kind
    EXHAUSTED: Report.Kind
    RESUMED: Report.Kind
    OVERDUE: Report.Kind
    UNANSWERED: Report.Kind
    UNCLAIMED: Report.Kind
    NATIVE: Report.Kind
    NEAR: Report.Kind
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    key: int
    generation: int
    kind: Report.Kind
    instance: int
    rank: int
    worker: int
    text: str
    timeout_seconds: float
    ranks: _containers.RepeatedCompositeFieldContainer[RankPosition]
    peer: int
    last: _containers.RepeatedCompositeFieldContainer[Submission]
    cause: _common_pb2.Verdict.Cause
    def __init__(self, key: _Optional[int] = ..., generation: _Optional[int] = ..., kind: _Optional[_Union[Report.Kind, str]] = ..., instance: _Optional[int] = ..., rank: _Optional[int] = ..., worker: _Optional[int] = ..., text: _Optional[str] = ..., timeout_seconds: _Optional[float] = ..., ranks: _Optional[_Iterable[_Union[RankPosition, _Mapping]]] = ..., peer: _Optional[int] = ..., last: _Optional[_Iterable[_Union[Submission, _Mapping]]] = ..., cause: _Optional[_Union[_common_pb2.Verdict.Cause, str]] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("instance", "op", "site", "contract", "collective")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    instance: int
    op: str
    site: str
    contract: bytes
    collective: _common_pb2.Collective
    def __init__(self, instance: _Optional[int] = ..., op: _Optional[str] = ..., site: _Optional[str] = ..., contract: _Optional[bytes] = ..., collective: _Optional[_Union[_common_pb2.Collective, _Mapping]] = ...) -> None: ...

class RankPosition(_message.Message):
    __slots__ = ("rank", "submitted", "finished", "last_op", "last_site", "arrived", "op", "site", "contract", "collective", "idle_seconds", "waits", "waited_seconds", "stack")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LAST_OP_FIELD_NUMBER: _ClassVar[int]
    LAST_SITE_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    WAITED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    submitted: int
    finished: int
    last_op: str
    last_site: str
    arrived: bool
    op: str
    site: str
    contract: bytes
    collective: _common_pb2.Collective
    idle_seconds: float
    waits: int
    waited_seconds: float
    stack: str
    def __init__(self, rank: _Optional[int] = ..., submitted: _Optional[int] = ..., finished: _Optional[int] = ..., last_op: _Optional[str] = ..., last_site: _Optional[str] = ..., arrived: bool = ..., op: _Optional[str] = ..., site: _Optional[str] = ..., contract: _Optional[bytes] = ..., collective: _Optional[_Union[_common_pb2.Collective, _Mapping]] = ..., idle_seconds: _Optional[float] = ..., waits: _Optional[int] = ..., waited_seconds: _Optional[float] = ..., stack: _Optional[str] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("key", "generation", "instance", "query")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    key: int
    generation: int
    instance: int
    query: int
    def __init__(self, key: _Optional[int] = ..., generation: _Optional[int] = ..., instance: _Optional[int] = ..., query: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("key", "generation", "instance", "query", "ranks")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    key: int
    generation: int
    instance: int
    query: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankPosition]
    def __init__(self, key: _Optional[int] = ..., generation: _Optional[int] = ..., instance: _Optional[int] = ..., query: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankPosition, _Mapping]]] = ...) -> None: ...

class Inspect(_message.Message):
    __slots__ = ("inspect",)
    INSPECT_FIELD_NUMBER: _ClassVar[int]
    inspect: int
    def __init__(self, inspect: _Optional[int] = ...) -> None: ...

class Inspection(_message.Message):
    __slots__ = ("inspect", "status")
    INSPECT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    inspect: int
    status: _status_pb2.WorkerStatus
    def __init__(self, inspect: _Optional[int] = ..., status: _Optional[_Union[_status_pb2.WorkerStatus, _Mapping]] = ...) -> None: ...

class AskTrace(_message.Message):
    __slots__ = ("trace", "request", "at")
    TRACE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    trace: int
    request: _trace_pb2.TraceRequest
    at: float
    def __init__(self, trace: _Optional[int] = ..., request: _Optional[_Union[_trace_pb2.TraceRequest, _Mapping]] = ..., at: _Optional[float] = ...) -> None: ...

class TracePart(_message.Message):
    __slots__ = ("trace", "part", "asked_at", "heard_at", "answered_at")
    TRACE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ASKED_AT_FIELD_NUMBER: _ClassVar[int]
    HEARD_AT_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_AT_FIELD_NUMBER: _ClassVar[int]
    trace: int
    part: _trace_pb2.WorkerTrace
    asked_at: float
    heard_at: float
    answered_at: float
    def __init__(self, trace: _Optional[int] = ..., part: _Optional[_Union[_trace_pb2.WorkerTrace, _Mapping]] = ..., asked_at: _Optional[float] = ..., heard_at: _Optional[float] = ..., answered_at: _Optional[float] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("key", "generation", "proposal")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    key: int
    generation: int
    proposal: int
    def __init__(self, key: _Optional[int] = ..., generation: _Optional[int] = ..., proposal: _Optional[int] = ...) -> None: ...

class Promised(_message.Message):
    __slots__ = ("proposal", "from_instance", "next_instance")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    FROM_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    proposal: int
    from_instance: int
    next_instance: int
    def __init__(self, proposal: _Optional[int] = ..., from_instance: _Optional[int] = ..., next_instance: _Optional[int] = ...) -> None: ...

class Newcomers(_message.Message):
    __slots__ = ("key", "generation", "proposal", "from_instance", "waiting")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    FROM_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    key: int
    generation: int
    proposal: int
    from_instance: int
    waiting: int
    def __init__(self, key: _Optional[int] = ..., generation: _Optional[int] = ..., proposal: _Optional[int] = ..., from_instance: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class DrainOrder(_message.Message):
    __slots__ = ("drain", "timeout_seconds", "generations", "leave", "stay")
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    STAY_FIELD_NUMBER: _ClassVar[int]
    drain: int
    timeout_seconds: float
    generations: _containers.RepeatedScalarFieldContainer[int]
    leave: bool
    stay: bool
    def __init__(self, drain: _Optional[int] = ..., timeout_seconds: _Optional[float] = ..., generations: _Optional[_Iterable[int]] = ..., leave: bool = ..., stay: bool = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ("drain", "cut")
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    drain: int
    cut: _containers.RepeatedCompositeFieldContainer[_status_pb2.Cut]
    def __init__(self, drain: _Optional[int] = ..., cut: _Optional[_Iterable[_Union[_status_pb2.Cut, _Mapping]]] = ...) -> None: ...

class EnlistRequest(_message.Message):
    __slots__ = ("host",)
    HOST_FIELD_NUMBER: _ClassVar[int]
    host: str
    def __init__(self, host: _Optional[str] = ...) -> None: ...

class EnlistReply(_message.Message):
    __slots__ = ("task",)
    TASK_FIELD_NUMBER: _ClassVar[int]
    task: int
    def __init__(self, task: _Optional[int] = ...) -> None: ...
