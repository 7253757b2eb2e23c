"""Destinations: what may stand for the devices that a result goes to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from collectived.cross_device.devices import device_of, normalize_device_name
from collectived.cross_device.values import DistributedValues
from collectived.values.indexed_slices import IndexedSlices


def destination_devices(destinations: Any) -> tuple[str, ...]:
    """The devices that a destination stands for: a `DistributedValues`, a device name, an array or `IndexedSlices`.

    Of an array only the device counts: it is never written. One in the memory of the host stands for CPU:0.

    Raises:
        ValueError: anything else, or there is no device in it.
    """
    if isinstance(destinations, DistributedValues):
        if not destinations.devices:
            raise ValueError(f"destinations must not be empty: this {type(destinations).__name__} has no components")
        return destinations.devices
    if isinstance(destinations, str):
        if not destinations:
            raise ValueError("destinations must not be empty: give a device name such as 'CPU:0'")
        return (normalize_device_name(destinations),)
    if isinstance(destinations, IndexedSlices) or (hasattr(destinations, "dtype") and hasattr(destinations, "shape")):
        return (device_of(destinations) or "CPU:0",)
    raise ValueError(
        "destinations must be a PerReplica or Mirrored value, an array or a device name such as 'CPU:0', "
        f"got {type(destinations).__name__}: {destinations!r}"
    )


def same_devices(some: Iterable[str], others: Iterable[str]) -> bool:
    """Whether these are the same devices, whatever their order, and how often each is named."""
    return set(some) == set(others)
