"""ReductionToOneDevice: all components on one device, added up there, the result copied to the destinations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectived.cross_device import local
from collectived.cross_device.devices import device_name
from collectived.cross_device.ops import CrossDeviceOps, Pair, Terms, mirrored, remaining
from collectived.cross_device.values import PerReplica
from collectived.session import Session
from collectived_proto.deadline import Deadline
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import ReduceOp


class ReductionToOneDevice(CrossDeviceOps):
    """Adds all components up on one device, in the order of the replicas, and copies the result to the destinations.

    Sparse components are joined in this process: if all are sparse, their rows follow each other without
    de-duplication; if any is dense, so is the result.

    Args:
        reduce_to_device: a device name; None: the first device of the destinations.
        accumulation_fn: from a list of the components, in the order of the replicas, to their sum; it runs in this
            process. None: the sum, on the device. Not asked where a component is sparse.
        session: None: the process's default session.

    Raises:
        ValueError: `reduce_to_device` is no device name.
        TypeError: `accumulation_fn` cannot be called.
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[list[Any]], Any] | None = None,
        *,
        session: Session | None = None,
    ) -> None:
        super().__init__(session=session)
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(f"accumulation_fn must be a function of a list of components, got {accumulation_fn!r}")
        self._device = None if reduce_to_device is None else device_name(reduce_to_device)
        self._accumulate = accumulation_fn

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """See `CrossDeviceOps`."""
        devices = self._devices(destinations)
        where = devices[0] if self._device is None else self._spread.devices([self._device])[0]
        return mirrored([self._reduced(reduce_op, per_replica_value, where, options)], devices)

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[Pair], options: CommunicationOptions
    ) -> list[Any]:
        """See `CrossDeviceOps`."""
        deadline = Deadline.after(options.timeout_seconds)
        return [
            self.reduce_implementation(reduce_op, value, destinations, remaining(options, deadline))
            for value, destinations in value_destination_pairs
        ]

    def _terms(self, options: CommunicationOptions, devices: Sequence[str]) -> Terms | None:
        """See `CrossDeviceOps`."""
        return Terms(options) if self._accumulate is None else None

    def _reduced(self, op: ReduceOp, value: PerReplica, where: str, options: CommunicationOptions) -> Any:
        components = value.values
        if any(map(local.is_sparse, components)) or (len(components) == 1 and self._accumulate is None):
            total = local.summed(components)
        elif self._accumulate is not None:
            total = local.copied(self._accumulate(list(components)))  # it may be one of them
        else:
            return self._reduced_there(op, value, where, options)
        return local.mean(total, len(components)) if op is ReduceOp.MEAN else total

    def _reduced_there(self, op: ReduceOp, value: PerReplica, where: str, options: CommunicationOptions) -> Any:
        """By the ranks of the components' devices where `where` is one of them; else all ranks are there."""
        devices = value.devices if where in value.devices else (where,) * len(value.devices)
        root = devices.index(where)
        ranks = self._spread.ranks(devices)
        return ranks.carry_out(
            lambda group: group.reduce(op, value.values[group.rank], root, options, async_op=True),
        )[root]
