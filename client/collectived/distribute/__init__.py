"""The names of tf.distribute: `import collectived as tf` is all that a program needs to change.

The same objects are at the top level of `collectived`.
"""

from collectived.cross_device.all_reduce import AllReduceCrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce
from collectived.cross_device.multi_worker import MultiWorkerMirroredStrategy, get_strategy
from collectived.cross_device.ops import CrossDeviceOps
from collectived.cross_device.reduction import ReductionToOneDevice
from collectived.cross_device.replica import get_replica_context
from collectived.cross_device.strategy import MirroredStrategy
from collectived.cross_device.values import DistributedValues
from collectived.distribute import experimental
from collectived_proto.types import ReduceOp

__all__ = [
    "AllReduceCrossDeviceOps",
    "CrossDeviceOps",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "ReduceOp",
    "ReductionToOneDevice",
    "experimental",
    "get_replica_context",
    "get_strategy",
]
