"""ReductionToOneDevice: all components on one device, added up there, the result copied to the destinations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectived.cross_device import component_math
from collectived.cross_device.ops import AllReduceTerms, CrossDeviceOps, make_mirrored
from collectived.cross_device.values import PerReplica, normalize_device_name
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
            process, without a time limit. None: the sum, on the device. Not called if a component is sparse.
        session: None: the process's default session.

    Raises:
        ValueError: `reduce_to_device` is no device name.
        TypeError: `accumulation_fn` cannot be called; at a reduction, it returned no such component.
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
        self._device = None if reduce_to_device is None else normalize_device_name(reduce_to_device)
        self._accumulate = accumulation_fn

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """See `CrossDeviceOps`."""
        components, deadline = per_replica_value.values, Deadline.after(options.timeout_seconds)
        devices = self._resolve_devices(destinations, deadline)
        if any(map(component_math.is_sparse, components)) or (len(components) == 1 and self._accumulate is None):
            result = component_math.reduce_components(components, reduce_op)
        elif self._accumulate is not None:
            result = self._apply_accumulation_fn(components, reduce_op)
        else:
            at = (
                devices[:1]
                if self._device is None
                else self._device_sessions(deadline).resolve_devices([self._device], deadline)
            )
            result = self._reduce_at(at[0], reduce_op, per_replica_value, options, deadline)
        there = dict(zip(per_replica_value.devices, components, strict=True))
        return make_mirrored([result], devices, examples=there)

    def _make_terms(self, options: CommunicationOptions, devices: Sequence[str]) -> AllReduceTerms | None:
        return AllReduceTerms(options) if self._accumulate is None else None

    def _apply_accumulation_fn(self, components: tuple[Any, ...], op: ReduceOp) -> Any:
        assert self._accumulate is not None
        total = self._accumulate(list(components))
        component_math.check_component(total, op, "the result of accumulation_fn")
        return (
            component_math.sum_to_mean(total, len(components))
            if op is ReduceOp.MEAN
            else component_math.copy_component(total)
        )  # it may be an input

    def _reduce_at(
        self, where: str, op: ReduceOp, value: PerReplica, options: CommunicationOptions, deadline: Deadline
    ) -> Any:
        """By the ranks of the components' devices where `where` is one of them; else all ranks are there."""
        devices = value.devices if where in value.devices else (where,) * len(value.devices)
        root = devices.index(where)
        ranks = self._device_sessions(deadline).get_ranks(devices, deadline=deadline)
        return ranks.run_collective(
            lambda group, left: group.reduce(op, value.values[group.rank], root, left, async_op=True),
            options,
            deadline,
        )[root]
