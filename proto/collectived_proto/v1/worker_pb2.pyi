from collectived_proto.v1 import common_pb2 as _common_pb2
from collectived_proto.v1 import status_pb2 as _status_pb2
from collectived_proto.v1 import trace_pb2 as _trace_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenSessionRequest(_message.Message):
    __slots__ = ("protocol", "host", "pid", "label", "job", "local", "visible_gpus", "stacks")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_GPUS_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    protocol: _common_pb2.Protocol
    host: str
    pid: int
    label: str
    job: str
    local: bool
    visible_gpus: str
    stacks: bool
    def __init__(self, protocol: _Optional[_Union[_common_pb2.Protocol, _Mapping]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., label: _Optional[str] = ..., job: _Optional[str] = ..., local: bool = ..., visible_gpus: _Optional[str] = ..., stacks: bool = ...) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("opened", "stack_asked")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    STACK_ASKED_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    stack_asked: StackQuestion
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., stack_asked: _Optional[_Union[StackQuestion, _Mapping]] = ...) -> None: ...

class StackQuestion(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("session", "protocol", "worker", "devices", "door", "token", "gpus", "openings", "stack_token")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DOOR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    OPENINGS_FIELD_NUMBER: _ClassVar[int]
    STACK_TOKEN_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    protocol: _common_pb2.Protocol
    worker: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    door: str
    token: bytes
    gpus: _containers.RepeatedScalarFieldContainer[str]
    openings: int
    stack_token: bytes
    def __init__(self, session: _Optional[bytes] = ..., protocol: _Optional[_Union[_common_pb2.Protocol, _Mapping]] = ..., worker: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ..., door: _Optional[str] = ..., token: _Optional[bytes] = ..., gpus: _Optional[_Iterable[str]] = ..., openings: _Optional[int] = ..., stack_token: _Optional[bytes] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("session", "name", "min_size", "max_size", "settle_seconds", "rank", "device", "timeout_seconds", "last_instance", "idle", "segment", "token", "parent")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MIN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SIZE_FIELD_NUMBER: _ClassVar[int]
    SETTLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    name: str
    min_size: int
    max_size: int
    settle_seconds: float
    rank: int
    device: str
    timeout_seconds: float
    last_instance: int
    idle: bool
    segment: bool
    token: bytes
    parent: HeldRank
    def __init__(self, session: _Optional[bytes] = ..., name: _Optional[str] = ..., min_size: _Optional[int] = ..., max_size: _Optional[int] = ..., settle_seconds: _Optional[float] = ..., rank: _Optional[int] = ..., device: _Optional[str] = ..., timeout_seconds: _Optional[float] = ..., last_instance: _Optional[int] = ..., idle: bool = ..., segment: bool = ..., token: _Optional[bytes] = ..., parent: _Optional[_Union[HeldRank, _Mapping]] = ...) -> None: ...

class HeldRank(_message.Message):
    __slots__ = ("key", "rank")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    key: int
    rank: int
    def __init__(self, key: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class JoinEvent(_message.Message):
    __slots__ = ("progress", "joined")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    progress: JoinProgress
    joined: Joined
    def __init__(self, progress: _Optional[_Union[JoinProgress, _Mapping]] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ...) -> None: ...

class JoinProgress(_message.Message):
    __slots__ = ("present", "expected", "text")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    present: int
    expected: int
    text: str
    def __init__(self, present: _Optional[int] = ..., expected: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("group", "rank", "door", "token", "segment", "matching")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DOOR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    MATCHING_FIELD_NUMBER: _ClassVar[int]
    group: _common_pb2.Group
    rank: int
    door: str
    token: bytes
    segment: bool
    matching: bool
    def __init__(self, group: _Optional[_Union[_common_pb2.Group, _Mapping]] = ..., rank: _Optional[int] = ..., door: _Optional[str] = ..., token: _Optional[bytes] = ..., segment: bool = ..., matching: bool = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("session", "key", "rank", "collective")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    key: int
    rank: int
    collective: _common_pb2.Collective
    def __init__(self, session: _Optional[bytes] = ..., key: _Optional[int] = ..., rank: _Optional[int] = ..., collective: _Optional[_Union[_common_pb2.Collective, _Mapping]] = ...) -> None: ...

class PrepareReply(_message.Message):
    __slots__ = ("id", "layout", "contract", "terms")
    ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    id: int
    layout: _common_pb2.Layout
    contract: bytes
    terms: bytes
    def __init__(self, id: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., contract: _Optional[bytes] = ..., terms: _Optional[bytes] = ...) -> None: ...

class RootValue(_message.Message):
    __slots__ = ("collective", "layout")
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    collective: _common_pb2.Collective
    layout: _common_pb2.Layout
    def __init__(self, collective: _Optional[_Union[_common_pb2.Collective, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: SubmitHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[SubmitHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class SubmitHeader(_message.Message):
    __slots__ = ("session", "key", "rank", "generation", "instance", "collective", "timeout_seconds", "asked_seconds")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ASKED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    key: int
    rank: int
    generation: int
    instance: int
    collective: _common_pb2.Collective
    timeout_seconds: float
    asked_seconds: float
    def __init__(self, session: _Optional[bytes] = ..., key: _Optional[int] = ..., rank: _Optional[int] = ..., generation: _Optional[int] = ..., instance: _Optional[int] = ..., collective: _Optional[_Union[_common_pb2.Collective, _Mapping]] = ..., timeout_seconds: _Optional[float] = ..., asked_seconds: _Optional[float] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("result", "data", "withdrawn", "waiting")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    result: SubmitResult
    data: bytes
    withdrawn: int
    waiting: int
    def __init__(self, result: _Optional[_Union[SubmitResult, _Mapping]] = ..., data: _Optional[bytes] = ..., withdrawn: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class SubmitResult(_message.Message):
    __slots__ = ("indices", "leaves", "structure", "total", "source")
    INDICES_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    leaves: _containers.RepeatedCompositeFieldContainer[_common_pb2.Leaf]
    structure: str
    total: int
    source: int
    def __init__(self, indices: _Optional[_Iterable[int]] = ..., leaves: _Optional[_Iterable[_Union[_common_pb2.Leaf, _Mapping]]] = ..., structure: _Optional[str] = ..., total: _Optional[int] = ..., source: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("session", "key", "rank", "generation", "instance")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    key: int
    rank: int
    generation: int
    instance: int
    def __init__(self, session: _Optional[bytes] = ..., key: _Optional[int] = ..., rank: _Optional[int] = ..., generation: _Optional[int] = ..., instance: _Optional[int] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session", "key", "rank", "reason", "cause")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    key: int
    rank: int
    reason: str
    cause: _common_pb2.Verdict.Cause
    def __init__(self, session: _Optional[bytes] = ..., key: _Optional[int] = ..., rank: _Optional[int] = ..., reason: _Optional[str] = ..., cause: _Optional[_Union[_common_pb2.Verdict.Cause, str]] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("session", "key", "rank", "join")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    key: int
    rank: int
    join: bytes
    def __init__(self, session: _Optional[bytes] = ..., key: _Optional[int] = ..., rank: _Optional[int] = ..., join: _Optional[bytes] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ("unseen",)
    UNSEEN_FIELD_NUMBER: _ClassVar[int]
    unseen: _common_pb2.Verdict
    def __init__(self, unseen: _Optional[_Union[_common_pb2.Verdict, _Mapping]] = ...) -> None: ...

class StackRequest(_message.Message):
    __slots__ = ("session", "stack")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    stack: str
    def __init__(self, session: _Optional[bytes] = ..., stack: _Optional[str] = ...) -> None: ...

class StackReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
