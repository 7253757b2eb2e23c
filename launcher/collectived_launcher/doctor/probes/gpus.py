"""GPUs and NCCL. Their libraries are loaded by a process of its own, which may crash or hang without us.

`python -m collectived_launcher.doctor.probes.gpus` is that process: it prints what it found as JSON.
"""

from __future__ import annotations

import ctypes
import importlib.metadata as metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from collectived_launcher.doctor.facts import GpuFacts, Gpus, NcclFacts

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"  # class of PCI devices: VGA and 3D controllers
_PACKAGES = {
    "nccl4py": ("nccl4py",),
    "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy"),
    "pynccl": ("pynccl",),
}


def query_libraries(within: float) -> dict[str, Any]:
    """Return the answers of NVML and libnccl; `trouble` where they do not answer in time."""
    line = [sys.executable, "-P", "-m", __name__]
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within)
    except subprocess.TimeoutExpired:
        return {"trouble": f"the NVIDIA driver does not answer within {within:g} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"trouble": f"the process that asked the NVIDIA driver ended: {said}"}
    return found


def probe_gpus(said: Mapping[str, Any], environment: Mapping[str, str]) -> Gpus:
    return Gpus(
        cards=_count_cards(),
        driver=said.get("driver", ""),
        cuda=said.get("cuda", ""),
        devices=tuple(GpuFacts(**device) for device in said.get("devices", ())),
        trouble=said.get("trouble", ""),
        chosen=environment.get("CUDA_VISIBLE_DEVICES"),
        rdma=tuple(sorted(os.listdir("/sys/class/infiniband"))) if os.path.isdir("/sys/class/infiniband") else (),
    )


def probe_nccl(said: Mapping[str, Any], environment: Mapping[str, str]) -> NcclFacts:
    bindings = {name: version for name, packages in _PACKAGES.items() if (version := _first_version(packages))}
    return NcclFacts(_requested_binding(environment.get("COLLECTIVED_NCCL", "")), bindings, said.get("nccl", ""))


def _requested_binding(wanted: str) -> str:
    """The binding that is asked for by name, or ''."""
    return "" if wanted.lower() == "auto" else wanted


def _first_version(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def _count_cards() -> int:
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        count += vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASS)
    return count


def _query_driver() -> dict[str, Any]:
    found: dict[str, Any] = {"nccl": _nccl_version()}
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return {**found, "absent": str(error)}
    if code := nvml.nvmlInit_v2():
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        said = nvml.nvmlErrorString(code)
        return {**found, "trouble": f"NVML: {said.decode() if said else f'error {code}'}"}
    cuda, count = ctypes.c_int(), ctypes.c_uint()
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return {
        **found,
        "driver": _query_text(nvml.nvmlSystemGetDriverVersion),
        "cuda": f"{cuda.value // 1000}.{cuda.value % 1000 // 10}",
        "devices": list(_query_devices(nvml, count.value)),
    }


def _query_devices(nvml: ctypes.CDLL, count: int) -> Iterator[dict[str, Any]]:
    for index in range(count):
        handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
            continue  # lost, or hidden from this user
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        name, uuid = _query_text(nvml.nvmlDeviceGetName, handle), _query_text(nvml.nvmlDeviceGetUUID, handle)
        yield {"index": index, "name": name, "uuid": uuid, "memory": memory[0]}


def _query_text(call: Any, *subject: Any) -> str:
    room = ctypes.create_string_buffer(128)
    return "" if call(*subject, room, ctypes.c_uint(len(room))) else room.value.decode(errors="replace")


def _nccl_version() -> str:
    """Of the libnccl that a program here would load: a package of this Python first, then the system's."""
    for path in (*_find_packaged("libnccl.so.2"), "libnccl.so.2"):
        try:
            library = ctypes.CDLL(path)
            version = ctypes.c_int()
            if not library.ncclGetVersion(ctypes.byref(version)):
                return f"{version.value // 10000}.{version.value % 10000 // 100}.{version.value % 100}"
        except (OSError, AttributeError):
            continue
    return ""


def _find_packaged(name: str) -> list[str]:
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    places = found.submodule_search_locations or () if found else ()
    return [path for place in places if os.path.exists(path := os.path.join(place, "lib", name))]


if __name__ == "__main__":
    print(json.dumps(_query_driver()))
