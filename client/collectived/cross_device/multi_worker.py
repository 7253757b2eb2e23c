"""MultiWorkerMirroredStrategy: a process per replica, as a strategy object over the process's default group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

from collectived.cross_device import component_math
from collectived.cross_device.ops import call_options, parse_reduce_op
from collectived.cross_device.replica import ProcessReplica, as_replica, current_strategy, in_scope, is_in_replica
from collectived.cross_device.strategy import MirroredStrategy
from collectived.cross_device.values import DistributedValues, Mirrored, destination_devices, local_results, select
from collectived.values import nest
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import ReduceOp


class MultiWorkerMirroredStrategy:
    """Runs a function as this process's replica, and combines results over the replicas of all processes.

    Each process is one replica of its default group, which is joined at the first use from the environment that
    `collectived launch` sets. All processes must make the same calls in the same order.

    Args:
        communication_options: for all collectives of the strategy and of its replica; those of a call override them.

    Raises:
        TypeError: `communication_options` are no `CommunicationOptions`.
    """

    def __init__(self, communication_options: CommunicationOptions | None = None) -> None:
        self._context = ProcessReplica(call_options(communication_options, None))
        self.extended = MultiWorkerExtended(self)

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are, one per process."""
        return self._context.num_replicas_in_sync

    def run(self, fn: Callable[..., Any], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls `fn` in this thread; `get_replica_context()` in it is this process's replica.

        Args:
            fn: the function.
            args, kwargs: its arguments; a `PerReplica` or `Mirrored` in them stands for its one component.

        Returns:
            The result of `fn`: the value of this replica.

        Raises:
            RuntimeError: called in a replica. ValueError: a `PerReplica` has several components.
            Exception: what `fn` raises.
        """
        if is_in_replica():
            raise RuntimeError("run() was called inside of run(): a replica cannot have replicas of its own")
        positional, named = tuple(args), dict(kwargs or {})
        for value in (*positional, *named.values()):
            for leaf in nest.flatten(value)[1]:
                _check_single(leaf)
        with as_replica(self._context), in_scope(self):
            return fn(*select(positional, 0), **select(named, 0))

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Reduces the values of all replicas; every process gets the result.

        Args:
            reduce_op: sum or mean.
            value: this replica's, as `run` returned it: arrays or numbers in any nest. The mean of a `Mirrored` is a
                copy, its sum an error.
            axis: reduce along this axis of each array, too; the mean then counts elements, not replicas.

        Returns:
            The nest with the result in each place.

        Raises:
            ValueError, TypeError: an argument is wrong. CollectiveError: the collective failed.
        """
        return self._reduce(parse_reduce_op(reduce_op), value, axis, None)

    def gather(self, value: Any, axis: SupportsIndex) -> Any:
        """Joins the values of all replicas along `axis`, in their order; every process gets all.

        Args:
            value: this replica's; lengths along `axis` may differ.
            axis: negative ones count from the end.

        Returns:
            The structure of `value` with the joined arrays.

        Raises:
            ValueError, CollectiveError: as `Group.all_gather`.
        """
        return self._context.all_gather(self._own(value), axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a value that are in this process.

        Args:
            value: `PerReplica` or `Mirrored`, or this replica's bare value.

        Returns:
            Its components; of a bare value that alone.
        """
        return local_results(value)

    @contextlib.contextmanager
    def scope(self) -> Iterator[MultiWorkerMirroredStrategy]:
        """In its block `get_strategy()` is this strategy; arrays are ordinary ones, so there is nothing to place."""
        with in_scope(self):
            yield self

    def _reduce(self, op: ReduceOp, value: Any, axis: int | None, options: CommunicationOptions | None) -> Any:
        spec, leaves = nest.flatten(value)
        if any(isinstance(leaf, Mirrored) for leaf in leaves):
            return nest.unflatten(spec, [self._reduce_leaf(op, leaf, axis, options) for leaf in leaves])
        if axis is None:
            return self._context.all_reduce(op, self._own(value), options)
        return nest.unflatten(spec, [self._reduce_leaf(op, leaf, axis, options) for leaf in leaves])

    def _reduce_leaf(self, op: ReduceOp, leaf: Any, axis: int | None, options: CommunicationOptions | None) -> Any:
        own = self._own(leaf)
        if isinstance(leaf, Mirrored):
            if op is ReduceOp.SUM:
                raise ValueError(
                    "the sum of a Mirrored value was asked for, equal on all replicas: give this replica's array"
                )
            return component_math.copy_component(own)
        if axis is None:
            return self._context.all_reduce(op, own, options)
        if op is ReduceOp.SUM:
            return self._context.all_reduce(op, component_math.sum_along(own, axis), options)
        parts = [part for (part,) in component_math.partial_sums([own], axis)]
        totals, count = self._context.all_reduce(ReduceOp.SUM, (parts, component_math.axis_length(own, axis)), options)
        return component_math.finish_mean(totals, count, own)

    def _own(self, value: Any) -> Any:
        """The value of this replica."""
        for leaf in nest.flatten(value)[1]:
            _check_single(leaf)
        return select(value, 0)


class MultiWorkerExtended:
    """The cross-device operations of a `MultiWorkerMirroredStrategy`: each replica gives and gets its own value."""

    def __init__(self, strategy: MultiWorkerMirroredStrategy) -> None:
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
        """`MultiWorkerMirroredStrategy.reduce`; `destinations` are checked, and this replica gets its own result."""
        destination_devices(destinations)
        chosen = call_options(options, experimental_hints)
        return self._strategy._reduce(parse_reduce_op(reduce_op), value, None, chosen)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Any]:
        """`reduce_to` of several values at once, which travel in packs of `bytes_per_pack`."""
        pairs = list(value_destination_pairs)
        for _, destinations in pairs:
            destination_devices(destinations)
        chosen, op = call_options(options, experimental_hints), parse_reduce_op(reduce_op)
        found: list[Any] = self._strategy._reduce(op, [value for value, _ in pairs], None, chosen) if pairs else []
        return found

    def broadcast_to(self, tensor: Any, destinations: Any = None) -> Any:
        """The value of replica 0, on every replica."""
        if destinations is not None:
            destination_devices(destinations)
        return self._strategy._context._group.broadcast(tensor)


_default = MultiWorkerMirroredStrategy()


def get_strategy() -> MirroredStrategy | MultiWorkerMirroredStrategy:
    """The strategy of this thread: of the `run` or the `scope()` that it is in, else one over all processes.

    The latter has no options of its own; its replica is that of `get_replica_context()`.
    """
    current: MirroredStrategy | MultiWorkerMirroredStrategy | None = current_strategy()
    return _default if current is None else current


def _check_single(leaf: Any) -> None:
    if isinstance(leaf, DistributedValues) and len(leaf.values) != 1:
        raise ValueError(
            f"a {type(leaf).__name__} of {len(leaf.values)} components was given: a process has one replica, so one "
            "component; MirroredStrategy has several"
        )
