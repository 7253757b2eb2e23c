"""MirroredStrategy: one process, one thread per device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from collectived.cross_device import component_math
from collectived.cross_device.all_reduce import NcclAllReduce
from collectived.cross_device.device_sessions import DeviceSessions, get_device_sessions
from collectived.cross_device.ops import CrossDeviceOps, parse_reduce_op
from collectived.cross_device.reduction import ReductionToOneDevice
from collectived.cross_device.replica import ReplicaBarrier, StrategyReplica, as_replica, in_scope, is_in_replica
from collectived.cross_device.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    destination_devices,
    local_results,
    normalize_device_name,
    regroup,
    select,
)
from collectived.group import Group
from collectived.session import Session
from collectived.values import nest
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import ReduceOp


class MirroredStrategy:
    """Runs a function on every device of this process and reduces the results of the replicas. Thread-safe.

    Args:
        devices: device names, one replica each. None: all GPUs of the session's worker, or its CPU:0 if it has none.
        cross_device_ops: how values are reduced; None: `NcclAllReduce` if all devices are GPUs, else
            `ReductionToOneDevice`.
        session: None: that of `cross_device_ops`, or the process's default session.

    Raises:
        ValueError: `devices` is empty, or a name in it cannot be read. TypeError: an argument of another type.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        session: Session | None = None,
    ) -> None:
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise TypeError(
                "cross_device_ops must be one such as HierarchicalCopyAllReduce(), or None, "
                f"got {type(cross_device_ops).__name__}"
            )
        if devices is not None and not isinstance(devices, (list, tuple)):
            raise TypeError(f"devices must be a list of device names, or None, got {devices!r}")
        if devices is not None and not devices:
            raise ValueError("devices is empty: give one device name per replica, or None for those of the worker")
        self._names = None if devices is None else tuple(map(normalize_device_name, devices))
        self._given_ops = cross_device_ops
        self._session = session if session is not None or cross_device_ops is None else cross_device_ops._session
        self._chosen_ops: CrossDeviceOps | None = None
        self.extended = StrategyExtended(self)

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are, one per device."""
        return len(self._devices)

    def run(self, fn: Callable[..., Any], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls `fn` once per device, each in a thread in which `get_replica_context()` is that replica.

        Args:
            fn: the function. If it raises, the collectives of the other replicas fail with `AbortedError`.
            args, kwargs: its arguments; of `PerReplica` and `Mirrored` values in them, in any nest, each replica gets
                its component.

        Returns:
            The results of the replicas, as one nest of `PerReplica`; bare leaves for one device, and if all replicas
            returned the same object, which is no number.

        Raises:
            RuntimeError: called in a replica. ValueError: the replicas returned different structures.
            Exception: what `fn` raised, first, in whichever replica.
        """
        if is_in_replica():
            raise RuntimeError("run() was called inside of run(): a replica cannot have replicas of its own")
        devices = self._devices
        board = ReplicaBarrier(self._ops, devices)
        named = dict(kwargs or {})
        positional = tuple(args)

        def body(group: Group) -> Any:
            with as_replica(StrategyReplica(group, board)), in_scope(self):
                return fn(*select(positional, group.rank), **select(named, group.rank))

        results = self._device_sessions.get_ranks(devices, "replicas").run(body)
        return regroup(results, devices)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Reduces the results of the replicas to one array, on the first device.

        Args:
            reduce_op: sum or mean.
            value: `PerReplica`, or a nest of such. Anything else is the same on all replicas: its mean is a copy, its
                sum an error unless there is one replica.
            axis: reduce along this axis of each component, too; the mean then counts elements, not replicas.

        Returns:
            The nest with an array in each place.

        Raises:
            ValueError, TypeError, CollectiveError: as `CrossDeviceOps.reduce`.
        """
        op = parse_reduce_op(reduce_op)
        spec, leaves = nest.flatten(value)
        where = self._devices[0]
        if axis is None:
            return nest.unflatten(spec, [self.extended.reduce_to(op, leaf, where) for leaf in leaves])
        return nest.unflatten(spec, [self._reduce_along(op, leaf, axis, where) for leaf in leaves])

    @contextlib.contextmanager
    def scope(self) -> Iterator[MirroredStrategy]:
        """In its block `get_strategy()` is this strategy; arrays are ordinary ones, so there is nothing to place."""
        with in_scope(self):
            yield self

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a value that are in this process: all of them.

        Args:
            value: `PerReplica` or `Mirrored`, or a bare value.

        Returns:
            Its components; of a bare value that alone.
        """
        return local_results(value)

    def _reduce_along(self, op: ReduceOp, value: Any, axis: int, where: str) -> Any:
        distributed = value if isinstance(value, DistributedValues) else PerReplica([value])
        components, devices = distributed.values, distributed.devices
        if op is ReduceOp.SUM:
            sums = [component_math.sum_along(component, axis) for component in components]
            return self.extended.reduce_to(op, PerReplica(sums, devices) if distributed is value else sums[0], where)
        pairs = [(PerReplica(parts, devices), where) for parts in component_math.partial_sums(components, axis)]
        totals = (
            self._ops.batch_reduce(ReduceOp.SUM, pairs) if distributed is value else [part.primary for part, _ in pairs]
        )
        count = sum(component_math.axis_length(component, axis) for component in components)
        return component_math.finish_mean(totals, count, distributed.primary)

    @property
    def _device_sessions(self) -> DeviceSessions:
        return get_device_sessions(self._session)

    @property
    def _devices(self) -> tuple[str, ...]:
        spread = self._device_sessions
        return spread.resolve_devices(self._names or spread.gpus or ("CPU:0",))

    @property
    def _ops(self) -> CrossDeviceOps:
        if self._given_ops is not None:
            return self._given_ops
        if self._chosen_ops is None:
            only_gpus = all("GPU" in device for device in self._devices)
            chosen = NcclAllReduce if only_gpus else ReductionToOneDevice
            self._chosen_ops = chosen(session=self._session)
        return self._chosen_ops


class StrategyExtended:
    """The cross-device operations of a strategy, on values that its replicas returned."""

    def __init__(self, strategy: MirroredStrategy) -> None:
        self._strategy = strategy

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """`CrossDeviceOps.reduce`, for values that may be the same on all replicas.

        The mean of a `Mirrored` or a bare value is a copy of it, on the same devices. The sum of a bare one is an error
        unless there is one replica, for it would have to be multiplied; 0 is 0.

        Raises:
            ValueError: the sum of a value that is the same on all replicas; else as `CrossDeviceOps.reduce`.
        """
        op = parse_reduce_op(reduce_op)
        if isinstance(value, Mirrored):
            if op is ReduceOp.MEAN:
                return Mirrored([_copy_checked(component) for component in value.values], value.devices)
            raise ValueError(
                "the sum of a Mirrored value was asked for, which is equal on all replicas: give PerReplica"
            )
        if not isinstance(value, DistributedValues):
            return self._reduce_bare(op, value, destinations)
        return self._strategy._ops.reduce(op, value, destinations, options, experimental_hints=experimental_hints)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Any]:
        """`CrossDeviceOps.batch_reduce` with the operation of this strategy."""
        ops = self._strategy._ops
        return ops.batch_reduce(reduce_op, value_destination_pairs, options, experimental_hints=experimental_hints)

    def broadcast_to(self, tensor: Any, destinations: Any = None) -> Any:
        """`CrossDeviceOps.broadcast`, by default to all devices; int and float of Python are left as they are."""
        if isinstance(tensor, (int, float)):
            return tensor
        if destinations is None:
            devices = self._strategy._devices
            destinations = Mirrored([None] * len(devices), devices)
        return self._strategy._ops.broadcast(tensor, destinations)

    def _reduce_bare(self, op: ReduceOp, value: Any, destinations: Any) -> Any:
        if isinstance(value, (int, float)) and value == 0:
            return value
        if op is ReduceOp.MEAN:
            return _copy_checked(value)
        replicas = self._strategy.num_replicas_in_sync
        if replicas != 1:
            raise ValueError(
                f"the sum over {replicas} replicas of a value that is the same on all of them was asked for, "
                f"a {type(value).__name__}: give a PerReplica value, or take the mean"
            )
        destination_devices(destinations)
        return self._strategy._ops.broadcast(value, destinations)


def _copy_checked(component: Any) -> Any:
    component_math.check_element_type(component, "the value")
    return component_math.copy_component(component)
