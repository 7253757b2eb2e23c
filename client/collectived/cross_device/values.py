"""Values with one component per replica, and how such are taken apart and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectived.cross_device.devices import device_of, normalize_device_name
from collectived.values import nest

_NUMBERS = (bool, int, float, complex)  # equal ones may be one object, which says nothing about where they come from


class DistributedValues:
    """One component per replica, in the order of the replicas. The base of `PerReplica` and `Mirrored`.

    Args:
        values: a list or tuple of components: arrays of any kind, numbers or `IndexedSlices`, in this process. They are
            kept as they are.
        devices: one device name per component, such as "CPU:1" or "/job:worker/task:1/device:GPU:0"; one without a task
            is a device of the session's worker. None: arrays on a GPU know theirs, all others are on CPU:0, CPU:1, …

    Raises:
        TypeError: `values` or `devices` is no list or tuple.
        ValueError: a device name cannot be read, or there are not as many as components.
    """

    __slots__ = ("_devices", "_values")

    def __init__(self, values: Sequence[Any], devices: Sequence[str] | None = None) -> None:
        self._values = _items(values, "values", "components, one per replica")
        if devices is None:
            names = [device_of(component) or f"CPU:{index}" for index, component in enumerate(self._values)]
        else:
            names = [
                normalize_device_name(name) for name in _items(devices, "devices", "device names, one per component")
            ]
        if len(names) != len(self._values):
            raise ValueError(f"devices must be as many as components: {len(names)} for {len(self._values)} components")
        self._devices = tuple(names)

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, in the order of the replicas."""
        return self._values

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each component; `CPU:1` without a task is one of the session's worker."""
        return self._devices

    @property
    def primary(self) -> Any:
        """The component of replica 0.

        Raises:
            ValueError: there are no components.
        """
        if not self._values:
            raise ValueError(f"this {type(self).__name__} has no components, so no primary one")
        return self._values[0]

    def __repr__(self) -> str:
        lines = "".join(f"\n  {device}: {value!r}" for device, value in zip(self._devices, self._values, strict=True))
        return f"{type(self).__name__}({lines})"


class PerReplica(DistributedValues):
    """Components that may differ from replica to replica, as gradients do."""

    __slots__ = ()


class Mirrored(DistributedValues):
    """Components that are equal on all replicas, as weights and sums are."""

    __slots__ = ()


def regroup(values: Sequence[Any], devices: Sequence[str]) -> Any:
    """What replicas returned, as one nest of `PerReplica`: `values[r]` is that of replica r.

    A leaf of one replica alone is bare. So is one that is the same object everywhere, unless it is a number.

    Raises:
        ValueError: the nests of two replicas differ.
    """
    specs, leaves = zip(*map(nest.flatten, values), strict=True)
    for replica, spec in enumerate(specs):
        if nest.structure(spec) != nest.structure(specs[0]):
            raise ValueError(
                f"replica {replica} returned {nest.structure(spec)}, replica 0 {nest.structure(specs[0])} "
                "(* is a leaf): all must return the same structure"
            )
    return nest.unflatten(specs[0], [_join_components(components, devices) for components in zip(*leaves, strict=True)])


def _join_components(components: tuple[Any, ...], devices: Sequence[str]) -> Any:
    first = components[0]
    shared = not isinstance(first, _NUMBERS) and all(component is first for component in components)
    return first if shared or len(components) == 1 else PerReplica(components, devices)


def select(value: Any, replica: int) -> Any:
    """The nest `value` as that replica sees it: of each `DistributedValues` in it its component."""
    match value:
        case DistributedValues():
            return value.values[replica]
        case dict():
            chosen = {key: select(item, replica) for key, item in value.items()}
            return value if _same(chosen.values(), value.values()) else chosen
        case list() | tuple():
            parts = [select(item, replica) for item in value]
            if _same(parts, value):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _same(found: Any, given: Any) -> bool:
    return all(one is other for one, other in zip(found, given, strict=True))


def _items(given: Any, name: str, expected: str) -> tuple[Any, ...]:
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name} must be a list or tuple of {expected}, got {type(given).__name__}")
    return tuple(given)
