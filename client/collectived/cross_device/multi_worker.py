"""MultiWorkerAllReduce: all-reduce across workers by algorithms that the caller chooses by size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from collectived.cross_device.all_reduce import AllReduceCrossDeviceOps, check_count
from collectived.cross_device.ops import AllReduceTerms
from collectived.session import Session
from collectived_proto.all_reduce_spec import parse_all_reduce_spec
from collectived_proto.devices import DeviceName
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import Tier


class MultiWorkerAllReduce(AllReduceCrossDeviceOps):
    """All-reduce over the devices of several workers, by algorithms chosen by size.

    Args:
        worker_devices: the workers whose devices take part, such as "/job:worker/replica:0/task:0".
        num_gpus_per_worker: how many GPUs each has that take part, from 0. It is checked and no more: the devices of a
            value say which take part.
        all_reduce_spec: an algorithm; a tuple (algorithm, shards, limit); or a list of such tuples in order of limit. A
            tensor goes by the first one whose limit, in bytes and before packing, it does not exceed; -1 takes the
            rest. It is split into so many shards, which travel side by side. Algorithms: nccl, nccl/xring, nccl/rechd,
            nccl/pscpu, xring, pscpu, psgpu, pscpu/pscpu.
        num_packs: tensors of one algorithm and type are cut into so many packs; 0: each by itself.
        agg_small_grads_max_bytes: with `num_packs=0`, neighbouring tensors of at most so many bytes travel together.
        agg_small_grads_max_group: at most so many of them.
        session: None: the process's default session.

    Raises:
        ValueError: an unknown algorithm, shards below 1, limits that do not increase or do not end with -1, a worker's
            name that cannot be read, none or the same one twice, or a negative number.
        TypeError: an argument of another type.
    """

    def __init__(
        self,
        worker_devices: Sequence[str],
        num_gpus_per_worker: int,
        all_reduce_spec: str | tuple[Any, ...] | list[tuple[Any, ...]] = ("pscpu/pscpu", 2, -1),
        num_packs: int = 0,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        *,
        session: Session | None = None,
    ) -> None:
        super().__init__(
            "hierarchical_copy", num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group, session=session
        )
        self._workers = _tasks(worker_devices)
        check_count(num_gpus_per_worker, "num_gpus_per_worker")
        self._spec: tuple[Tier, ...] = parse_all_reduce_spec(all_reduce_spec)

    def _make_terms(self, options: CommunicationOptions, devices: Sequence[str]) -> AllReduceTerms:
        """See `CrossDeviceOps`."""
        for device in devices:
            if DeviceName.parse(device).task not in self._workers:
                known = ", ".join(f"task {task}" for task in sorted(self._workers))
                raise ValueError(f"a component is on {device}, but worker_devices names {known} alone: add its worker")
        return replace(super()._make_terms(options, devices), all_reduce_spec=self._spec)


def _tasks(worker_devices: Sequence[str]) -> frozenset[int]:
    """The workers by their task; a name may go on with a device."""
    expected = "a list of workers such as '/job:worker/replica:0/task:0'"
    if isinstance(worker_devices, str) or not isinstance(worker_devices, Sequence):
        raise TypeError(f"worker_devices must be {expected}, got {worker_devices!r}")
    tasks = []
    for name in worker_devices:
        if not isinstance(name, str):
            raise TypeError(f"worker_devices must be {expected}, got {name!r} in it")
        worker, device, rest = name.partition("/device:")
        try:
            tasks.append(DeviceName.parse(f"{worker}/device:{rest if device else 'CPU:0'}").task)
        except ValueError:
            raise ValueError(f"worker_devices must be {expected}, got {name!r} in it") from None
    if not tasks or len(set(tasks)) < len(tasks):
        raise ValueError(f"worker_devices must be {expected}, at least one and each once, got {worker_devices!r}")
    return frozenset(tasks)
