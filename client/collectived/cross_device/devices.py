"""Devices by name, and what an array says about its own."""

from __future__ import annotations

from typing import Any

from collectived.gpu.array import DeviceArray
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
