"""Collective communication for machine learning and HPC, run as a service.

    import collectived as cd

    with cd.connect() as session, session.join() as group:
        print(group.rank, group.all_reduce("sum", {"x": float(group.rank)}))

run by `collectived launch --clients 2 -- python prog.py`.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from collectived import contrib, distribute, errors, integrations
from collectived.contrib.distribute import MultiWorkerAllReduce
from collectived.cross_device.values import Mirrored, PerReplica
from collectived.distribute import (
    AllReduceCrossDeviceOps,
    CrossDeviceOps,
    DistributedValues,
    HierarchicalCopyAllReduce,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    NcclAllReduce,
    ReductionToOneDevice,
    get_replica_context,
    get_strategy,
)
from collectived.group import Group
from collectived.session import Session, connect
from collectived.values.error_feedback import ErrorFeedback
from collectived.values.indexed_slices import IndexedSlices
from collectived.work import Work, wait
from collectived_proto.options import CollectiveHints, CommunicationOptions
from collectived_proto.types import RELEASE, CommunicationImplementation, Member, ReduceOp

if TYPE_CHECKING:
    from collectived import mpi, testing
else:

    def __getattr__(name: str) -> ModuleType:
        """Import `mpi` and `testing` on first use: importing them takes time, and few programs need them."""
        if name in ("mpi", "testing"):
            return import_module(f"collectived.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return [*__all__, "__version__"]


CollectiveCommunication = CommunicationImplementation
__version__ = RELEASE

__all__ = [
    "AllReduceCrossDeviceOps",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "DistributedValues",
    "ErrorFeedback",
    "Group",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "Member",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerAllReduce",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "Session",
    "Work",
    "connect",
    "contrib",
    "distribute",
    "errors",
    "get_replica_context",
    "get_strategy",
    "integrations",
    "mpi",
    "testing",
    "wait",
]
