"""Replicas of a strategy: threads that reduce by the strategy's cross-device operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectived.cross_device.ops import CrossDeviceOps, call_options
from collectived.cross_device.replica import ReplicaContext
from collectived.cross_device.timeouts import start_deadline, with_remaining_timeout
from collectived.cross_device.values import DistributedValues, PerReplica
from collectived.group import Group
from collectived.values import nest
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import ReduceOp


class ReplicaBarrier:
    """Where the replicas of one run meet: what each gives, and what came of it.

    Args:
        ops: the operation of the strategy, chosen by the caller or by default.
        devices: of the replicas, in full.
    """

    def __init__(self, ops: CrossDeviceOps, devices: Sequence[str]) -> None:
        self.ops = ops
        self.devices = tuple(devices)
        self.contributions: list[tuple[nest.Spec, list[Any]]] = [(nest.NONE, [])] * len(self.devices)
        self.results: list[Any] | Exception = []

    def reduce(self, reduce_op: ReduceOp | str, options: CommunicationOptions) -> None:
        """Reduces what all have given, by the operation."""
        try:
            structures = [nest.structure(spec) for spec, _ in self.contributions]
            for replica, structure in enumerate(structures):
                if structure != structures[0]:
                    raise ValueError(f"replica {replica} gave {structure}, replica 0 {structures[0]} (* is a leaf)")
            leaves = zip(*(leaves for _, leaves in self.contributions), strict=True)
            values = [PerReplica(components, self.devices) for components in leaves]
            self.results = self.ops.batch_reduce(reduce_op, [(value, value) for value in values], options)
        except Exception as error:
            self.results = error


class StrategyReplica(ReplicaContext):
    """A replica of a strategy. An operation that is no plain all-reduce is carried out by replica 0, for all."""

    def __init__(self, group: Group, board: ReplicaBarrier) -> None:
        super().__init__(lambda: group)
        self._barrier = board

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """See `ReplicaContext`."""
        ops = self._barrier.ops
        chosen = call_options(options, experimental_hints)
        terms = ops._make_terms(chosen, self._barrier.devices)
        if terms is None:
            return self._reduce_on_first(reduce_op, value, chosen, async_op)
        return self._group._all_reduce_packed(
            reduce_op,
            value,
            terms.options,
            all_reduce_spec=terms.all_reduce_spec,
            packing=terms.packing,
            async_op=async_op,
        )

    def _reduce_on_first(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions, async_op: bool
    ) -> Any:
        if async_op:
            raise ValueError(
                f"async_op is not offered with {type(self._barrier.ops).__name__}, which runs in this process"
            )
        group, board = self._group, self._barrier
        spec, leaves = nest.flatten(value)
        board.contributions[group.rank] = spec, leaves
        options, deadline = start_deadline(options)
        group.barrier(options)  # all have given
        if group.rank == 0:
            board.reduce(reduce_op, with_remaining_timeout(options, deadline))
        group.barrier(
            with_remaining_timeout(options, deadline)
        )  # it is reduced, and may be taken until all meet here again
        if isinstance(board.results, Exception):
            raise board.results
        mine = [one.values[group.rank] if isinstance(one, DistributedValues) else one for one in board.results]
        return nest.unflatten(spec, mine)
