"""The public names of the client library: a name that appears or vanishes does so on purpose."""

from __future__ import annotations

import collectived as cd
from collectived import errors


def test_what_users_import() -> None:
    assert sorted(cd.__all__) == [
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


def test_dir_shows_what_is_public_and_nothing_else() -> None:
    assert dir(cd) == sorted([*cd.__all__, "__version__"])
    assert all(getattr(cd, name) is not None for name in dir(cd))


def test_the_errors() -> None:
    assert sorted(errors.__all__) == [
        "AbortedError",
        "CancelledError",
        "Code",
        "CollectiveError",
        "DeadlineExceededError",
        "FailedPreconditionError",
        "InternalError",
        "InvalidArgumentError",
        "NotFoundError",
        "PermissionDeniedError",
        "ResourceExhaustedError",
        "UnauthenticatedError",
        "UnavailableError",
        "UnimplementedError",
    ]


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    for module in (cd, errors):
        for name in module.__all__:
            assert getattr(module, name).__doc__, name
