"""Collective communication for machine learning and HPC, run as a service.

    import collectived as cd

    with cd.connect() as session, session.join() as group:
        print(group.rank, group.all_reduce("sum", {"x": float(group.rank)}))

run by `collectived launch --clients 2 -- python prog.py`.
"""

from collectived import errors
from collectived.group import Group
from collectived.session import Session, connect
from collectived.work import Work, wait
from collectived_proto.options import CollectiveHints, CommunicationOptions
from collectived_proto.types import RELEASE, CommunicationImplementation, Member, ReduceOp

CollectiveCommunication = CommunicationImplementation
__version__ = RELEASE

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Group",
    "Member",
    "ReduceOp",
    "Session",
    "Work",
    "connect",
    "errors",
    "wait",
]
