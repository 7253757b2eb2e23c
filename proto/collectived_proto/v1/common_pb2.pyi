from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    BOOL: _ClassVar[DataType]
    INT8: _ClassVar[DataType]
    INT16: _ClassVar[DataType]
    INT32: _ClassVar[DataType]
    INT64: _ClassVar[DataType]
    UINT8: _ClassVar[DataType]
    UINT16: _ClassVar[DataType]
    UINT32: _ClassVar[DataType]
    UINT64: _ClassVar[DataType]
    FLOAT16: _ClassVar[DataType]
    BFLOAT16: _ClassVar[DataType]
    FLOAT32: _ClassVar[DataType]
    FLOAT64: _ClassVar[DataType]
    COMPLEX64: _ClassVar[DataType]
    COMPLEX128: _ClassVar[DataType]

class ReduceOp(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDUCE_OP_UNSPECIFIED: _ClassVar[ReduceOp]
    SUM: _ClassVar[ReduceOp]
    MEAN: _ClassVar[ReduceOp]
    MIN: _ClassVar[ReduceOp]
    MAX: _ClassVar[ReduceOp]
    PRODUCT: _ClassVar[ReduceOp]
    BAND: _ClassVar[ReduceOp]
    BOR: _ClassVar[ReduceOp]
    BXOR: _ClassVar[ReduceOp]

class Implementation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AUTO: _ClassVar[Implementation]
    RING: _ClassVar[Implementation]
    NCCL: _ClassVar[Implementation]
DATA_TYPE_UNSPECIFIED: DataType
BOOL: DataType
INT8: DataType
INT16: DataType
INT32: DataType
INT64: DataType
UINT8: DataType
UINT16: DataType
UINT32: DataType
UINT64: DataType
FLOAT16: DataType
BFLOAT16: DataType
FLOAT32: DataType
FLOAT64: DataType
COMPLEX64: DataType
COMPLEX128: DataType
REDUCE_OP_UNSPECIFIED: ReduceOp
SUM: ReduceOp
MEAN: ReduceOp
MIN: ReduceOp
MAX: ReduceOp
PRODUCT: ReduceOp
BAND: ReduceOp
BOR: ReduceOp
BXOR: ReduceOp
AUTO: Implementation
RING: Implementation
NCCL: Implementation

class CommunicationOptions(_message.Message):
    __slots__ = ("bytes_per_pack", "implementation", "all_reduce_spec", "packing", "compression")
    class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[CommunicationOptions.Compression]
        BFLOAT16: _ClassVar[CommunicationOptions.Compression]
        FLOAT8: _ClassVar[CommunicationOptions.Compression]
        INT8: _ClassVar[CommunicationOptions.Compression]
    NONE: CommunicationOptions.Compression
    BFLOAT16: CommunicationOptions.Compression
    FLOAT8: CommunicationOptions.Compression
    INT8: CommunicationOptions.Compression
    BYTES_PER_PACK_FIELD_NUMBER: _ClassVar[int]
    IMPLEMENTATION_FIELD_NUMBER: _ClassVar[int]
    ALL_REDUCE_SPEC_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    bytes_per_pack: int
    implementation: Implementation
    all_reduce_spec: _containers.RepeatedCompositeFieldContainer[Tier]
    packing: Packing
    compression: CommunicationOptions.Compression
    def __init__(self, bytes_per_pack: _Optional[int] = ..., implementation: _Optional[_Union[Implementation, str]] = ..., all_reduce_spec: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ..., packing: _Optional[_Union[Packing, _Mapping]] = ..., compression: _Optional[_Union[CommunicationOptions.Compression, str]] = ...) -> None: ...

class Packing(_message.Message):
    __slots__ = ("num_packs", "max_bytes", "max_group")
    NUM_PACKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUP_FIELD_NUMBER: _ClassVar[int]
    num_packs: int
    max_bytes: int
    max_group: int
    def __init__(self, num_packs: _Optional[int] = ..., max_bytes: _Optional[int] = ..., max_group: _Optional[int] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("algorithm", "shards", "limit", "bytes_per_pack")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_PACK_FIELD_NUMBER: _ClassVar[int]
    algorithm: str
    shards: int
    limit: int
    bytes_per_pack: int
    def __init__(self, algorithm: _Optional[str] = ..., shards: _Optional[int] = ..., limit: _Optional[int] = ..., bytes_per_pack: _Optional[int] = ...) -> None: ...

class Leaf(_message.Message):
    __slots__ = ("path", "dtype", "shape")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    path: str
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, path: _Optional[str] = ..., dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Collective(_message.Message):
    __slots__ = ("all_reduce", "reduce", "broadcast", "barrier", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "send", "recv", "structure", "leaves", "options", "site", "open")
    ALL_REDUCE_FIELD_NUMBER: _ClassVar[int]
    REDUCE_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    ALL_GATHER_FIELD_NUMBER: _ClassVar[int]
    GATHER_FIELD_NUMBER: _ClassVar[int]
    SCATTER_FIELD_NUMBER: _ClassVar[int]
    REDUCE_SCATTER_FIELD_NUMBER: _ClassVar[int]
    ALL_TO_ALL_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    RECV_FIELD_NUMBER: _ClassVar[int]
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    all_reduce: AllReduce
    reduce: Reduce
    broadcast: Broadcast
    barrier: Barrier
    all_gather: AllGather
    gather: Gather
    scatter: Scatter
    reduce_scatter: ReduceScatter
    all_to_all: AllToAll
    send: SendTo
    recv: RecvFrom
    structure: str
    leaves: _containers.RepeatedCompositeFieldContainer[Leaf]
    options: CommunicationOptions
    site: str
    open: bool
    def __init__(self, all_reduce: _Optional[_Union[AllReduce, _Mapping]] = ..., reduce: _Optional[_Union[Reduce, _Mapping]] = ..., broadcast: _Optional[_Union[Broadcast, _Mapping]] = ..., barrier: _Optional[_Union[Barrier, _Mapping]] = ..., all_gather: _Optional[_Union[AllGather, _Mapping]] = ..., gather: _Optional[_Union[Gather, _Mapping]] = ..., scatter: _Optional[_Union[Scatter, _Mapping]] = ..., reduce_scatter: _Optional[_Union[ReduceScatter, _Mapping]] = ..., all_to_all: _Optional[_Union[AllToAll, _Mapping]] = ..., send: _Optional[_Union[SendTo, _Mapping]] = ..., recv: _Optional[_Union[RecvFrom, _Mapping]] = ..., structure: _Optional[str] = ..., leaves: _Optional[_Iterable[_Union[Leaf, _Mapping]]] = ..., options: _Optional[_Union[CommunicationOptions, _Mapping]] = ..., site: _Optional[str] = ..., open: bool = ...) -> None: ...

class AllReduce(_message.Message):
    __slots__ = ("reduce_op",)
    REDUCE_OP_FIELD_NUMBER: _ClassVar[int]
    reduce_op: ReduceOp
    def __init__(self, reduce_op: _Optional[_Union[ReduceOp, str]] = ...) -> None: ...

class Reduce(_message.Message):
    __slots__ = ("reduce_op", "root")
    REDUCE_OP_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    reduce_op: ReduceOp
    root: int
    def __init__(self, reduce_op: _Optional[_Union[ReduceOp, str]] = ..., root: _Optional[int] = ...) -> None: ...

class Broadcast(_message.Message):
    __slots__ = ("root",)
    ROOT_FIELD_NUMBER: _ClassVar[int]
    root: int
    def __init__(self, root: _Optional[int] = ...) -> None: ...

class Barrier(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AllGather(_message.Message):
    __slots__ = ("axis",)
    AXIS_FIELD_NUMBER: _ClassVar[int]
    axis: int
    def __init__(self, axis: _Optional[int] = ...) -> None: ...

class Gather(_message.Message):
    __slots__ = ("root", "axis")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    root: int
    axis: int
    def __init__(self, root: _Optional[int] = ..., axis: _Optional[int] = ...) -> None: ...

class Scatter(_message.Message):
    __slots__ = ("root", "axis", "sizes")
    ROOT_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    root: int
    axis: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, root: _Optional[int] = ..., axis: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class ReduceScatter(_message.Message):
    __slots__ = ("reduce_op", "axis", "sizes")
    REDUCE_OP_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    reduce_op: ReduceOp
    axis: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reduce_op: _Optional[_Union[ReduceOp, str]] = ..., axis: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class AllToAll(_message.Message):
    __slots__ = ("axis", "sizes")
    AXIS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    axis: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, axis: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class SendTo(_message.Message):
    __slots__ = ("to", "tag")
    TO_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    to: int
    tag: int
    def __init__(self, to: _Optional[int] = ..., tag: _Optional[int] = ...) -> None: ...

class RecvFrom(_message.Message):
    __slots__ = ("source", "tag")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    source: int
    tag: int
    def __init__(self, source: _Optional[int] = ..., tag: _Optional[int] = ...) -> None: ...

class Pack(_message.Message):
    __slots__ = ("dtype", "result_dtype", "count", "staging_offset", "result_offset")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RESULT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    STAGING_OFFSET_FIELD_NUMBER: _ClassVar[int]
    RESULT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    dtype: DataType
    result_dtype: DataType
    count: int
    staging_offset: int
    result_offset: int
    def __init__(self, dtype: _Optional[_Union[DataType, str]] = ..., result_dtype: _Optional[_Union[DataType, str]] = ..., count: _Optional[int] = ..., staging_offset: _Optional[int] = ..., result_offset: _Optional[int] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("pack", "offset")
    PACK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    pack: int
    offset: int
    def __init__(self, pack: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("packs", "places", "staging_bytes", "result_bytes")
    PACKS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESULT_BYTES_FIELD_NUMBER: _ClassVar[int]
    packs: _containers.RepeatedCompositeFieldContainer[Pack]
    places: _containers.RepeatedCompositeFieldContainer[Place]
    staging_bytes: int
    result_bytes: int
    def __init__(self, packs: _Optional[_Iterable[_Union[Pack, _Mapping]]] = ..., places: _Optional[_Iterable[_Union[Place, _Mapping]]] = ..., staging_bytes: _Optional[int] = ..., result_bytes: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("rank", "device", "worker", "host", "pid", "label", "last_instance", "last_op", "last_site", "idle_seconds", "stack")
    RANK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    LAST_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    LAST_OP_FIELD_NUMBER: _ClassVar[int]
    LAST_SITE_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    device: str
    worker: int
    host: str
    pid: int
    label: str
    last_instance: int
    last_op: str
    last_site: str
    idle_seconds: float
    stack: str
    def __init__(self, rank: _Optional[int] = ..., device: _Optional[str] = ..., worker: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., label: _Optional[str] = ..., last_instance: _Optional[int] = ..., last_op: _Optional[str] = ..., last_site: _Optional[str] = ..., idle_seconds: _Optional[float] = ..., stack: _Optional[str] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("name", "key", "generation", "members")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    key: int
    generation: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, name: _Optional[str] = ..., key: _Optional[int] = ..., generation: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("group", "key", "generation", "code", "message", "from_instance", "instance", "op", "missing", "differing", "successor", "decided_by", "members", "orderly", "progress", "cause", "origin", "next_instance")
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Verdict.Cause]
        DEADLINE: _ClassVar[Verdict.Cause]
        LOST_RANK: _ClassVar[Verdict.Cause]
        LOST_WORKER: _ClassVar[Verdict.Cause]
        LOST_LINK: _ClassVar[Verdict.Cause]
        ABORTED: _ClassVar[Verdict.Cause]
        LEFT: _ClassVar[Verdict.Cause]
        MISMATCH: _ClassVar[Verdict.Cause]
        EXHAUSTED: _ClassVar[Verdict.Cause]
        NATIVE: _ClassVar[Verdict.Cause]
        DRAINED: _ClassVar[Verdict.Cause]
        FORGOTTEN: _ClassVar[Verdict.Cause]
        CANCELLED: _ClassVar[Verdict.Cause]
        REFUSED: _ClassVar[Verdict.Cause]
        DEFECT: _ClassVar[Verdict.Cause]
        LINK_REFUSED: _ClassVar[Verdict.Cause]
    UNSPECIFIED: Verdict.Cause
    DEADLINE: Verdict.Cause
    LOST_RANK: Verdict.Cause
    LOST_WORKER: Verdict.Cause
    LOST_LINK: Verdict.Cause
    ABORTED: Verdict.Cause
    LEFT: Verdict.Cause
    MISMATCH: Verdict.Cause
    EXHAUSTED: Verdict.Cause
    NATIVE: Verdict.Cause
    DRAINED: Verdict.Cause
    FORGOTTEN: Verdict.Cause
    CANCELLED: Verdict.Cause
    REFUSED: Verdict.Cause
    DEFECT: Verdict.Cause
    LINK_REFUSED: Verdict.Cause
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FROM_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    SUCCESSOR_FIELD_NUMBER: _ClassVar[int]
    DECIDED_BY_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ORDERLY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    NEXT_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    group: str
    key: int
    generation: int
    code: int
    message: str
    from_instance: int
    instance: int
    op: str
    missing: _containers.RepeatedCompositeFieldContainer[Member]
    differing: _containers.RepeatedCompositeFieldContainer[Member]
    successor: int
    decided_by: str
    members: _containers.RepeatedCompositeFieldContainer[Member]
    orderly: bool
    progress: Progress
    cause: Verdict.Cause
    origin: int
    next_instance: int
    def __init__(self, group: _Optional[str] = ..., key: _Optional[int] = ..., generation: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., from_instance: _Optional[int] = ..., instance: _Optional[int] = ..., op: _Optional[str] = ..., missing: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., differing: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., successor: _Optional[int] = ..., decided_by: _Optional[str] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., orderly: bool = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., cause: _Optional[_Union[Verdict.Cause, str]] = ..., origin: _Optional[int] = ..., next_instance: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("last_instances", "last_ops", "last_sites", "idle_seconds", "texts", "missing", "differing", "stacks")
    LAST_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    LAST_OPS_FIELD_NUMBER: _ClassVar[int]
    LAST_SITES_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    last_instances: _containers.RepeatedScalarFieldContainer[int]
    last_ops: _containers.RepeatedScalarFieldContainer[int]
    last_sites: _containers.RepeatedScalarFieldContainer[int]
    idle_seconds: _containers.RepeatedScalarFieldContainer[float]
    texts: _containers.RepeatedScalarFieldContainer[str]
    missing: _containers.RepeatedScalarFieldContainer[int]
    differing: _containers.RepeatedScalarFieldContainer[int]
    stacks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, last_instances: _Optional[_Iterable[int]] = ..., last_ops: _Optional[_Iterable[int]] = ..., last_sites: _Optional[_Iterable[int]] = ..., idle_seconds: _Optional[_Iterable[float]] = ..., texts: _Optional[_Iterable[str]] = ..., missing: _Optional[_Iterable[int]] = ..., differing: _Optional[_Iterable[int]] = ..., stacks: _Optional[_Iterable[str]] = ...) -> None: ...

class Protocol(_message.Message):
    __slots__ = ("lowest", "highest", "release")
    LOWEST_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    lowest: int
    highest: int
    release: str
    def __init__(self, lowest: _Optional[int] = ..., highest: _Optional[int] = ..., release: _Optional[str] = ...) -> None: ...
