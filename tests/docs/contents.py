"""Which pages there are, and what docstrings do not say yet."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import collectived as cd

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
EXAMPLES = ROOT / "docs" / "examples"
HOOK = "integrations.torch.allreduce_hook"
RAY = "integrations.ray.start"
# Read without being imported, for their libraries need not be here.
UNIMPORTED = {HOOK: "client/collectived/integrations/torch.py", RAY: "client/collectived/integrations/ray.py"}
WRITTEN_BY_HAND = ("environment",)
OTHER_PAGES = ("cli", "configuration", "messages", "status")  # not of public names; each has a test of its own

CONTENTS = {
    "Sessions and groups": [
        *("connect", "Session", "Session.join", "Session.empty", "Session.close"),
        *("Group", "Group.split", "Group.rejoin", "Group.leave", "Group.abort", "Member"),
    ],
    "Collectives": [
        *("Group.all_reduce", "Group.reduce", "Group.broadcast", "Group.all_gather", "Group.gather", "Group.scatter"),
        *("Group.reduce_scatter", "Group.all_to_all", "Group.send", "Group.recv", "Group.barrier"),
    ],
    "With `async_op=True`": [
        *("Work", "Work.result", "Work.wait", "Work.done", "Work.exception", "Work.cancel"),
        "Work.add_done_callback",
        *("Work.as_completed", "wait"),
    ],
    "Options and values": [
        *("CommunicationOptions", "CommunicationImplementation", "CollectiveCommunication", "CollectiveHints"),
        *("ReduceOp", "IndexedSlices", "ErrorFeedback", "DistributedValues", "PerReplica", "Mirrored"),
    ],
    "Replicas and cross-device operations": [
        *("get_replica_context", "get_strategy", "MultiWorkerMirroredStrategy", "MirroredStrategy"),
        *("CrossDeviceOps", "AllReduceCrossDeviceOps", "NcclAllReduce"),
        *("HierarchicalCopyAllReduce", "ReductionToOneDevice", "MultiWorkerAllReduce", "distribute", "contrib"),
    ],
    "Errors, environment, other libraries, tests of yours": [
        "errors",
        "environment",
        "integrations",
        HOOK,
        RAY,
        "mpi",
        "testing",
        "testing.local",
        "testing.LocalJob",
    ],
}
COMMON = {  # what docstrings of collectives leave to habit
    "value": "an array or number, or a nest of such; see [all collectives](Group.md#all-collectives).",
    "root": "a rank of the group, the same on all ranks.",
    "out": "a nest of the result's structure whose arrays take the result, and which is returned.",
    "timeout": "seconds, the same as `options` with that `timeout_seconds`.",
    "axis": "along which arrays are cut or joined, the same on all ranks; negative ones count from the end.",
    "source": "the rank that sends, under `tag`; this rank itself, too, as `send` says.",
    "tag": "the tag of the `send`.",
    "experimental_hints": "deprecated name of `options`; both together are a ValueError.",
}
UNSAID = {  # the same of other docstrings
    "Reductions.reduce": {"value": "as for `all_reduce`; of `IndexedSlices` only `root` gets the rows."},
    "Group.abort": {"reason": "a text, which all ranks are shown."},
    "Work.exception": {"timeout": "as for `result`."},
    "Work.add_done_callback": {"callback": "a function of this `Work`; it should be short, and not wait."},
    "wait": {"works": "any iterable of `Work`; they need not be of one group."},
    "Member": {
        "rank, device": "which rank, on which device, in full.",
        "worker, host, pid": "the task of its worker, the host's name, the process.",
        "label": "how people know the process: COLLECTIVED_LABEL, else the pod's name or the Slurm step; or ''.",
        "last_instance, last_op": "the last collective that it is known to have finished; -1: none.",
        "last_site": "file:line of its last call.",
        "idle_seconds": "how long ago that was.",
    },
    "CommunicationOptions.merge": {"other": "options that override this object's wherever they are not None."},
    "CollectiveHints": {"bytes_per_pack, timeout_seconds": "as for `CommunicationOptions`."},
    "ReduceOp.of": {"value": "a member, or its name."},
    "CrossDeviceOps.broadcast": {
        "tensor": "an array, a number or `IndexedSlices`, in this process.",
        "destinations": "as for `reduce`.",
    },
    "CrossDeviceOps.batch_reduce_implementation": {
        "reduce_op, options": "as for `reduce_implementation`.",
        "value_destination_pairs": "(value, destinations), each as for `reduce_implementation`.",
    },
    "CrossDeviceOps.broadcast_implementation": {"tensor, destinations": "as the caller gave them."},
    "ReplicaContext.all_gather": {
        "value, axis": "as for `Group.all_gather`.",
        "options": "of this call.",
    },
    "StrategyExtended.reduce_to": {
        "reduce_op, destinations, options, experimental_hints": "as for `CrossDeviceOps.reduce`.",
        "value": "`PerReplica`, `Mirrored`, or a bare value, which is the same on all replicas.",
    },
    "StrategyExtended.batch_reduce_to": {
        "reduce_op, value_destination_pairs, options, experimental_hints": "as for `CrossDeviceOps.batch_reduce`.",
    },
    "StrategyExtended.broadcast_to": {"tensor, destinations": "as for `CrossDeviceOps.broadcast`."},
    "MultiWorkerExtended.reduce_to": {
        "reduce_op, value": "as for `MultiWorkerMirroredStrategy.reduce`.",
        "destinations": "as for `CrossDeviceOps.reduce`.",
        "options, experimental_hints": "of this call, over those of the strategy.",
    },
    "MultiWorkerExtended.batch_reduce_to": {
        "reduce_op, value_destination_pairs": "as for `CrossDeviceOps.batch_reduce`.",
        "options, experimental_hints": "of this call, over those of the strategy.",
    },
    "MultiWorkerExtended.broadcast_to": {"tensor, destinations": "as for `CrossDeviceOps.broadcast`."},
}


def names() -> list[str]:
    """Every page, in the order of the contents."""
    return [name for part in CONTENTS.values() for name in part]


def public() -> set[str]:
    """Every name that must have a page, as the code has it."""
    methods = {
        f"{owner.__name__}.{name}"
        for owner in (cd.Group, cd.Session, cd.Work)
        for name, _ in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_")
    }
    of_testing = {f"testing.{name}" for name in cd.testing.__all__}
    return {*cd.__all__, *methods, *of_testing, *UNIMPORTED, *WRITTEN_BY_HAND}


def resolved(name: str) -> Any:
    found: Any = cd
    for part in name.split("."):
        found = getattr(found, part)
    return found


def is_alias(name: str) -> bool:
    found = resolved(name)
    return not isinstance(found, ModuleType) and found.__name__ != name.rpartition(".")[2]
