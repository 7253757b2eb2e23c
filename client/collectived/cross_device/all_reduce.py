"""Cross-device operations by all-reduce: where values lie on the devices that want their sum."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from collectived.arguments import check_integer
from collectived.cross_device import component_math
from collectived.cross_device.ops import AllReduceTerms, CrossDeviceOps, ValueAndDestinations, make_mirrored
from collectived.cross_device.reduction import ReductionToOneDevice
from collectived.cross_device.timeouts import with_remaining_timeout
from collectived.cross_device.values import PerReplica, same_devices
from collectived.session import Session
from collectived_proto.all_reduce_spec import parse_all_reduce_spec
from collectived_proto.deadline import Deadline
from collectived_proto.devices import DeviceName
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import CommunicationImplementation, Packing, ReduceOp, Tier

_ALGORITHMS = ("nccl", "hierarchical_copy")
_MAX_COUNT = 1 << 62


class AllReduceCrossDeviceOps(CrossDeviceOps):
    """Base of the operations that reduce by one all-reduce over the devices of a value.

    Values of a batch that lie on the same devices travel together. A value that is wanted on other devices than its
    own, or is sparse, goes by `ReductionToOneDevice`; the former is said once in the log "collectived".

    Args:
        all_reduce_alg: "nccl", or "hierarchical_copy": folded on each worker, then across the workers.
        num_packs: all dense values of a batch and of one type are joined and cut into this many packs; 0: each
            value by itself. If a call's options have `bytes_per_pack`, that is used instead.
        agg_small_grads_max_bytes: with `num_packs=0`, neighbouring values of at most so many bytes travel together.
        agg_small_grads_max_group: at most so many of them.
        session: None: the process's default session.

    Raises:
        ValueError: an unknown algorithm, or a negative number. TypeError: not a whole number.
    """

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        *,
        session: Session | None = None,
    ) -> None:
        super().__init__(session=session)
        if all_reduce_alg not in _ALGORITHMS:
            raise ValueError(f"all_reduce_alg must be one of {', '.join(_ALGORITHMS)}, got {all_reduce_alg!r}")
        self._algorithm = all_reduce_alg
        self._packing = Packing(
            check_count(num_packs, "num_packs"),
            check_count(agg_small_grads_max_bytes, "agg_small_grads_max_bytes"),
            check_count(agg_small_grads_max_group, "agg_small_grads_max_group"),
        )
        self._fallback = ReductionToOneDevice(session=session)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """See `CrossDeviceOps`."""
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[ValueAndDestinations],
        options: CommunicationOptions,
    ) -> list[Any]:
        """See `CrossDeviceOps`."""
        deadline = Deadline.after(options.timeout_seconds)
        results: list[Any] = [None] * len(value_destination_pairs)
        together: dict[tuple[str, ...], list[int]] = {}
        for number, (value, destinations) in enumerate(value_destination_pairs):
            if self._can_all_reduce(value, destinations, deadline):
                together.setdefault(value.devices, []).append(number)
            else:
                results[number] = self._fallback.reduce_implementation(
                    reduce_op, value, destinations, with_remaining_timeout(options, deadline)
                )
        for devices, numbers in together.items():
            values = [value_destination_pairs[number][0] for number in numbers]
            reduced = self._all_reduce(reduce_op, values, devices, options, deadline)
            for number, components in zip(numbers, reduced, strict=True):
                wanted = self._resolve_devices(value_destination_pairs[number][1], deadline)
                results[number] = make_mirrored(components, wanted, devices)
        return results

    def _make_terms(self, options: CommunicationOptions, devices: Sequence[str]) -> AllReduceTerms:
        if self._algorithm == "nccl" and options.implementation is CommunicationImplementation.AUTO:
            options = replace(options, implementation=CommunicationImplementation.NCCL)
        return AllReduceTerms(options, packing=None if options.bytes_per_pack else self._packing)

    def _can_all_reduce(self, value: PerReplica, destinations: Any, deadline: Deadline) -> bool:
        wanted = self._resolve_devices(destinations, deadline)
        if any(map(component_math.is_sparse, value.values)):
            return False
        if not same_devices(value.devices, wanted):
            self._log_once(
                "elsewhere",
                f"a value on {', '.join(value.devices)} is wanted on {', '.join(wanted)}: ReductionToOneDevice is used",
                logging.INFO,
            )
            return False
        return True

    def _all_reduce(
        self,
        op: ReduceOp,
        values: Sequence[PerReplica],
        devices: tuple[str, ...],
        options: CommunicationOptions,
        deadline: Deadline,
    ) -> list[list[Any]]:
        """For each value the results of all ranks."""
        terms = self._make_terms(options, devices)

        def contribution(rank: int) -> Any:
            parts = [value.values[rank] for value in values]
            return parts if len(parts) > 1 else parts[0]  # alone it has no path in errors

        by_rank = (
            self._device_sessions(deadline)
            .get_ranks(devices, deadline=deadline)
            .run_collective(
                lambda group, left: group._all_reduce_packed(
                    op,
                    contribution(group.rank),
                    left,
                    all_reduce_spec=terms.all_reduce_spec,
                    packing=terms.packing,
                    async_op=True,
                ),
                terms.options,
                deadline,
            )
        )
        rows = by_rank if len(values) > 1 else [[result] for result in by_rank]
        return [list(components) for components in zip(*rows, strict=True)]


class NcclAllReduce(AllReduceCrossDeviceOps):
    """Reduces by NCCL's all-reduce over the devices of a value; on CPUs by the ring, said in the log of the workers.

    Args:
        num_packs: how many packs a batch is cut into, per type; 0: each value by itself.
        session: None: the process's default session.

    Raises:
        ValueError: `num_packs` is negative. TypeError: it is no whole number.
    """

    def __init__(self, num_packs: int = 1, *, session: Session | None = None) -> None:
        super().__init__("nccl", num_packs, session=session)


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """Reduces level by level: on each worker its devices, then across the workers; for any number of devices.

    Args:
        num_packs: how many packs a batch is cut into, per type; 0: each value by itself.
        session: None: the process's default session.

    Raises:
        ValueError: `num_packs` is negative. TypeError: it is no whole number.
    """

    def __init__(self, num_packs: int = 1, *, session: Session | None = None) -> None:
        super().__init__("hierarchical_copy", num_packs, session=session)


def check_count(number: int, name: str) -> int:
    """Checks an argument that counts something."""
    return check_integer(number, name, 0, _MAX_COUNT, "a whole number, not negative")


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
