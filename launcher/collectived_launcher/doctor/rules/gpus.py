"""GPUs, and NCCL with the binding in use."""

from __future__ import annotations

from collections.abc import Iterator

from collectived_launcher.doctor.facts import GpuFacts, Gpus, NcclFacts, Software
from collectived_launcher.doctor.finding import Finding, failure, ok, warning
from collectived_launcher.doctor.rules.software import BINDINGS
from collectived_launcher.doctor.versions import parse_version

OLDEST_CUDA = (12, 0)
OLDEST_NCCL = (2, 23)  # the first with which nccl4py can begin


def check_gpus(gpus: Gpus) -> Iterator[Finding]:
    if not gpus.cards and not gpus.devices:
        yield ok("gpus", "no GPU here; workers offer the devices CPU:0 to CPU:7")
    elif not gpus.driver:
        yield warning(
            "gpus",
            f"{gpus.cards} NVIDIA {'card' if gpus.cards == 1 else 'cards'}, and no driver that answers"
            f"{f': {gpus.trouble}' if gpus.trouble else ''}",
            "install the NVIDIA driver, until nvidia-smi shows the cards; start a container with --gpus all",
        )
    else:
        yield _check_driver(gpus)


def _check_driver(gpus: Gpus) -> Finding:
    shown = select_visible(gpus.devices, gpus.chosen)
    chosen = "" if gpus.chosen is None else f" (CUDA_VISIBLE_DEVICES={gpus.chosen})"
    text = f"driver {gpus.driver} (CUDA {gpus.cuda}); {len(shown)} of {len(gpus.devices)} visible{chosen}"
    if parse_version(gpus.cuda) < OLDEST_CUDA:
        return warning("gpus", text, "install a driver for CUDA 12 or newer: libraries for older ones are not made")
    if not gpus.devices:
        return warning("gpus", text, "start the container with --gpus all, or ask the batch system for a GPU")
    if not shown:
        return warning("gpus", text, "unset CUDA_VISIBLE_DEVICES, or name GPUs that are there, from 0")
    return ok("gpus", f"{text}: {', '.join(f'{gpu.index} {gpu.name} {gpu.memory >> 30} GiB' for gpu in shown)}")


def select_visible(devices: tuple[GpuFacts, ...], chosen: str | None) -> list[GpuFacts]:
    """Those that CUDA shows a program: up to the first entry that names none, as its documentation has it."""
    if chosen is None:
        return list(devices)
    shown: list[GpuFacts] = []
    for entry in (word.strip() for word in chosen.split(",")):
        named = [gpu for gpu in devices if entry == str(gpu.index) or (entry and gpu.uuid.startswith(entry))]
        if len(named) != 1 or named[0] in shown:
            break
        shown += named
    return shown


def check_nccl(nccl: NcclFacts, gpus: Gpus, software: Software) -> Iterator[Finding]:
    if not gpus.cards and not gpus.devices:
        yield ok("nccl", "not needed: no GPU here")
        return
    if nccl.wanted and nccl.wanted not in BINDINGS:
        return  # `environment` says it
    binding = nccl.wanted or next((name for name in BINDINGS if name in nccl.bindings), "")
    if not binding:
        yield warning("nccl", "there is a GPU, and no binding of NCCL", pip_command("nccl4py", gpus, software))
    elif binding not in nccl.bindings:
        text = f"COLLECTIVED_NCCL={binding}, which is not installed"
        yield failure("nccl", text, f"{pip_command(binding, gpus, software)}, or unset COLLECTIVED_NCCL")
    elif not nccl.version:
        text = f"{binding} {nccl.bindings[binding]} is installed, and finds no libnccl.so.2"
        yield warning("nccl", text, f"pip install nvidia-nccl-cu{cuda_major(gpus)}")
    elif parse_version(nccl.version) < OLDEST_NCCL:
        text = f"{binding} {nccl.bindings[binding]} with libnccl {nccl.version}, which is too old"
        yield warning("nccl", text, f'pip install --upgrade "nvidia-nccl-cu{cuda_major(gpus)}>=2.28"')
    else:
        how = "COLLECTIVED_NCCL" if nccl.wanted else "by default"
        yield ok("nccl", f"{binding} {nccl.bindings[binding]} ({how}), libnccl {nccl.version}")


def pip_command(binding: str, gpus: Gpus, software: Software) -> str:
    """The command that installs a binding for the driver's CUDA: an extra of collectived where there is one."""
    major = cuda_major(gpus)
    extra = "pynccl" if binding == "pynccl" else f"cuda{major}"
    if extra in software.extras:
        return f'pip install "collectived[{extra}]"'
    package = {"cupy": f"cupy-cuda{major}x", "pynccl": "pynccl numba"}.get(binding, binding)
    return f"pip install {package} nvidia-nccl-cu{major}"


def cuda_major(gpus: Gpus) -> int:
    """13 where the driver can, else 12."""
    return 13 if parse_version(gpus.cuda) >= (13,) else 12
