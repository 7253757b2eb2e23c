"""Values with one component per replica, the devices that they lie on, and those that a result goes to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from collectived.gpu.array import DeviceArray
from collectived.values import nest
from collectived.values.indexed_slices import IndexedSlices
from collectived_proto.devices import DeviceName

_NO_TASK = -1  # the task of a name that says none
_GPUS = ("cuda", "gpu")


def normalize_device_name(text: object) -> str:
    """A device name in one form: in full where it says its worker, else `CPU:0`, a device of the session's worker.

    Raises:
        ValueError: not a device name.
    """
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a device name: expected a text such as 'CPU:0' or '/task:1/device:GPU:0'")
    found = DeviceName.parse(text, _NO_TASK)
    return found.short if found.task == _NO_TASK else str(found)


def full_device_name(text: str, task: int) -> str:
    """The device in full; a name that says no worker is one of worker `task`."""
    return str(DeviceName.parse(text, task))


def device_of(component: Any) -> str | None:
    """The GPU on which an array lies, as it says itself; None for all that lies in the memory of the host.

    Understood are the `device` of arrays of PyTorch, CuPy and JAX, and of a `DeviceArray`.
    """
    if isinstance(component, IndexedSlices):
        return device_of(component.values)
    if isinstance(component, DeviceArray):
        return f"GPU:{component.device}"
    device = getattr(component, "device", None)
    if device is None or isinstance(device, str):  # NumPy says "cpu"
        return None
    kind = getattr(device, "type", None) or getattr(device, "platform", None)
    if kind is None and hasattr(component, "__cuda_array_interface__"):
        kind = "cuda"  # CuPy: its devices are all of one kind
    if kind not in _GPUS:
        return None
    index = getattr(device, "index", None)
    index = getattr(device, "id", 0) if index is None or callable(index) else index
    return f"GPU:{index}"


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
    """Combine the values that replicas returned into one nest of `PerReplica`: `values[r]` is that of replica r.

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


def local_results(value: Any) -> tuple[Any, ...]:
    """The components of a value; of a bare one that alone."""
    return value.values if isinstance(value, DistributedValues) else (value,)


def _same(found: Any, given: Any) -> bool:
    return all(one is other for one, other in zip(found, given, strict=True))


def _items(given: Any, name: str, expected: str) -> tuple[Any, ...]:
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name} must be a list or tuple of {expected}, got {type(given).__name__}")
    return tuple(given)


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
