"""Cross-device operations: reductions and broadcasts over values with one component per device."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collectived.cross_device import component_math
from collectived.cross_device.device_sessions import DeviceSessions, get_device_sessions
from collectived.cross_device.timeouts import NO_DEADLINE, start_deadline, with_remaining_timeout
from collectived.cross_device.values import DistributedValues, Mirrored, PerReplica, destination_devices, same_devices
from collectived.session import Session
from collectived_proto.deadline import Deadline
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import Packing, ReduceOp, Tier

log = logging.getLogger("collectived")

ValueAndDestinations = tuple[
    PerReplica, Any
]  # a value whose devices are known in full, and a destination as the caller gave it
_DEFAULT = CommunicationOptions()


@dataclass(frozen=True, slots=True)
class AllReduceTerms:
    """The arguments of an all-reduce beside its value."""

    options: CommunicationOptions
    all_reduce_spec: tuple[Tier, ...] = ()
    packing: Packing | None = None


class CrossDeviceOps:
    """Base of the cross-device operations. Thread-safe.

    One client holds a value with a component for each device, on the devices of one or several workers, and wants the
    sum or the mean of the components on some devices. The ranks of a hidden group carry it out, one per device; it is
    joined at the first use of these devices and kept as long as the session.

    A class of your own overrides `reduce_implementation`, and `batch_reduce_implementation` where a batch can be done
    better than pair by pair.

    Args:
        session: whose worker names without a task belong to, and whose job's workers are reached; None: the process's
            default session, connected at the first use.
    """

    def __init__(self, *, session: Session | None = None) -> None:
        if session is not None and not isinstance(session, Session):
            raise TypeError(f"session must be what cd.connect() returned, or None, got {type(session).__name__}")
        self._session = session
        self._logged: set[str] = set()

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Combines the components of a value, and puts the result on the destinations' devices.

        Args:
            reduce_op: sum or mean, as `ReduceOp` or text. The mean of integers is floating.
            per_replica_value: `PerReplica` or `Mirrored` with components of one shape and type, dense or sparse; an
                array or a number is a value of one component.
            destinations: `PerReplica` or `Mirrored`, of which only the devices count; a device name; an array on a
                device.
            options: bytes per pack, time limit and implementation of this call.
            experimental_hints: older name of `options`.

        Returns:
            `Mirrored` with an array of its own for every device of the destinations; for one device the bare array.
            Arrays are of the kind of the components, and never those that were given.

        Raises:
            ValueError: an argument is none of these, a value has no components, or both `options` and
                `experimental_hints` are given. Components that differ are an `InvalidArgumentError`, which is one.
            TypeError: collectives do not carry the components, or the operation does not take their elements.
            NotFoundError: a worker has no such device.
            CollectiveError: the collective failed; the next call joins again if necessary.
        """
        op, chosen = parse_reduce_op(reduce_op), call_options(options, experimental_hints)
        given = _check_value(op, per_replica_value, "the value", destinations)
        chosen, deadline = start_deadline(chosen)
        value = self._resolve_value(given, deadline)
        if self._is_in_place(value, destinations, deadline):
            return component_math.reduce_components(value.values, op)
        return self.reduce_implementation(op, value, destinations, with_remaining_timeout(chosen, deadline))

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduces several values at once, each to destinations of its own.

        Args:
            reduce_op: as for `reduce`.
            value_destination_pairs: any iterable of tuples (value, destinations), as for `reduce`; shapes, element
                types, devices, sparse and dense ones may be mixed.
            options, experimental_hints: as for `reduce`; the time limit is one for all.

        Returns:
            The result of `reduce` for each pair, in the order of the pairs; [] for none.

        Raises:
            ValueError: a pair is no tuple of two; else as `reduce`.
        """
        op, chosen = parse_reduce_op(reduce_op), call_options(options, experimental_hints)
        given = [_check_pair(op, pair, f"pair {number}") for number, pair in enumerate(value_destination_pairs)]
        chosen, deadline = start_deadline(chosen)
        pairs = [(self._resolve_value(value, deadline), where) for value, where in given]
        staying = [self._is_in_place(*pair, deadline) for pair in pairs]
        left = [pair for pair, stays in zip(pairs, staying, strict=True) if not stays]
        reduced = iter(
            self.batch_reduce_implementation(op, left, with_remaining_timeout(chosen, deadline)) if left else ()
        )
        return [
            component_math.reduce_components(value.values, op) if stays else next(reduced)
            for (value, _), stays in zip(pairs, staying, strict=True)
        ]

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copies an array, a number or `IndexedSlices` to every device of the destinations.

        Returns:
            `Mirrored` with an array of its own for every device; for one device the bare array.

        Raises:
            ValueError, TypeError, NotFoundError: as `reduce`.
        """
        destination_devices(destinations)
        if isinstance(tensor, DistributedValues):
            raise ValueError(f"a {type(tensor).__name__} cannot be broadcast: give one component of it, as .primary is")
        component_math.check_element_type(tensor, "the value")
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Carry out `reduce`, with arguments that are checked; to be overridden.

        Args:
            reduce_op: SUM or MEAN.
            per_replica_value: at least one component, and devices in full.
            destinations: as the caller gave them.
            options: never None; its time limit is the rest of the call's.
        """
        raise NotImplementedError(f"{type(self).__name__} must override reduce_implementation")

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[ValueAndDestinations],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Carry out `batch_reduce`, with pairs that are checked, one at least: here one after the other."""
        deadline = Deadline.after(options.timeout_seconds)
        return [
            self.reduce_implementation(reduce_op, value, where, with_remaining_timeout(options, deadline))
            for value, where in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Carry out `broadcast`, with arguments that are checked."""
        return make_mirrored([component_math.copy_component(tensor)], self._resolve_devices(destinations))

    def _make_terms(self, options: CommunicationOptions, devices: Sequence[str]) -> AllReduceTerms | None:
        """How an all-reduce over these devices is asked for; None where this operation is more than an all-reduce."""
        return None

    def _device_sessions(self, deadline: Deadline = NO_DEADLINE) -> DeviceSessions:
        return get_device_sessions(self._session, deadline)

    def _resolve_devices(self, destinations: Any, deadline: Deadline = NO_DEADLINE) -> tuple[str, ...]:
        return self._device_sessions(deadline).resolve_devices(destination_devices(destinations), deadline)

    def _is_in_place(self, value: PerReplica, destinations: Any, deadline: Deadline) -> bool:
        return len(value.values) == 1 and same_devices(value.devices, self._resolve_devices(destinations, deadline))

    def _resolve_value(self, value: DistributedValues, deadline: Deadline) -> PerReplica:
        return PerReplica(value.values, self._device_sessions(deadline).resolve_devices(value.devices, deadline))

    def _log_once(self, matter: str, text: str, level: int = logging.WARNING) -> None:
        if matter not in self._logged:
            self._logged.add(matter)
            log.log(level, "%s: %s", type(self).__name__, text)


def parse_reduce_op(reduce_op: ReduceOp | str) -> ReduceOp:
    """SUM or MEAN.

    Raises:
        ValueError: another operation, or none. TypeError: neither a `ReduceOp` nor a text.
    """
    op = ReduceOp.of(reduce_op)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(f"cross-device operations are sum and mean, got {op.value}: Group.all_reduce has all others")
    return op


def call_options(
    options: CommunicationOptions | None, experimental_hints: CommunicationOptions | None
) -> CommunicationOptions:
    """The options of a call under whichever name they were given.

    Raises:
        ValueError: both are given. TypeError: they are no options.
    """
    if options is not None and experimental_hints is not None:
        raise ValueError("options and experimental_hints were both given: give options alone")
    chosen = experimental_hints if options is None else options
    if chosen is not None and not isinstance(chosen, CommunicationOptions):
        raise TypeError(f"options must be CommunicationOptions or None, got {type(chosen).__name__}")
    return _DEFAULT if chosen is None else chosen


def make_mirrored(
    results: Sequence[Any],
    devices: Sequence[str],
    held: Sequence[str] = (),
    examples: Mapping[str, Any] | None = None,
) -> Any:
    """A result on every one of `devices`: `Mirrored`, or the bare array for one device.

    Args:
        results: equal arrays in memory of their own, one at least; further results are copies.
        held: the devices of the results, which keep theirs; () for one result without a device.
        examples: by device, an array that lies there; copies lie beside it.
    """
    unused = list(zip(held or devices, results, strict=False))
    parts = []
    for device in devices:
        here = next((number for number, (where, _) in enumerate(unused) if where == device), None)
        part = component_math.copy_component(results[0]) if here is None else unused.pop(here)[1]
        parts.append(component_math.move_beside((examples or {}).get(device), part))
    return parts[0] if len(parts) == 1 else Mirrored(parts, devices)


def _check_pair(op: ReduceOp, pair: object, name: str) -> tuple[DistributedValues, Any]:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(f"{name} must be a tuple (value, destinations), got {pair!r}")
    value, destinations = pair
    return _check_value(op, value, f"the value of {name}", destinations), destinations


def _check_value(op: ReduceOp, given: Any, name: str, destinations: Any) -> DistributedValues:
    """The value with its components, if it can be reduced at all. No other rank is asked."""
    if given is None or isinstance(given, (str, list, tuple, dict)):
        raise ValueError(
            f"{name} must be a PerReplica or Mirrored value, an array or a number, got {type(given).__name__}; "
            "for one component per replica give PerReplica([...], devices)"
        )
    value = given if isinstance(given, DistributedValues) else PerReplica([given])
    if not value.values:
        raise ValueError(f"{name} has no components: there is nothing to reduce")
    for replica, component in enumerate(value.values):
        component_math.check_component(component, op, f"component {replica} of {name}")
    destination_devices(destinations)
    return value
