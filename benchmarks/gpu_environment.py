"""The machine and the libraries of a report about GPUs: `python -m benchmarks.gpu_environment`."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

_LIBRARIES = (
    "torch",
    "cupy",
    "jax",
    "numpy",
    "cuda-bindings",
    "nccl4py",
    "pynccl",
    "nvidia-nccl",
    "grpcio",
    "collectived",
)


def describe() -> Iterator[str]:
    """Lines."""
    yield f"{platform.platform()}, Python {platform.python_version()}"
    yield from _ask_driver()
    for name, version in sorted(_versions()):
        yield f"{name} {version}"
    yield from _ask_bindings()


def driver_version(file: Path) -> str:
    """Of the kernel module, as that file says; where there is none, that it is not known."""
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", file.read_text()) if file.exists() else None
    return found[1] if found else "not known"


def _ask_driver() -> Iterator[str]:
    fields = "name,driver_version,memory.total,memory.used,utilization.gpu"
    try:
        yield subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"], capture_output=True, text=True, timeout=20
        ).stdout.strip()
    except FileNotFoundError:
        yield "no nvidia-smi on the path"


def _versions() -> Iterator[tuple[str, str]]:
    for found in importlib.metadata.distributions():
        name = (found.metadata["Name"] or "").lower()
        if name.startswith(_LIBRARIES):
            yield name, found.version


def _ask_bindings() -> Iterator[str]:
    from collectived_proto.errors import FailedPreconditionError
    from collectived_runtime.device.nccl.binding import BINDINGS, load_binding

    for name in BINDINGS:
        try:
            yield f"NCCL by {name}: {load_binding(name).version()}"
        except FailedPreconditionError as error:
            yield f"NCCL by {name}: {error}"


if __name__ == "__main__":
    print("\n".join(describe()))
