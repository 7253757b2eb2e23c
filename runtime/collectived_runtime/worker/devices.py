"""What devices a worker offers: virtual CPUs always, and the GPUs that it is told of or finds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from collectived_proto.devices import DeviceName
from collectived_runtime.device.cuda.driver import Cuda, CudaError
from collectived_runtime.device.gpus import Gpu, chosen
from collectived_runtime.engine.results import Budget, Share

CPU_DEVICES = 8
_SHARE = 2  # one part in so many of a GPU's memory may be its clients'
_DRIVER = "/proc/driver/nvidia/version"  # there where NVIDIA's driver is loaded
_INSTALL = "pip install 'collectived[cuda12]', or [cuda13] for CUDA 13"

GetCuda = Callable[[], Cuda]


@dataclass(frozen=True, slots=True)
class Offer:
    """What a worker offers.

    Attributes:
        missing: why GPUs that are there are not offered; "" where nothing is missing.
        budgets: of the memory that clients are given of each GPU.
    """

    cpus: int
    gpus: tuple[Gpu, ...] = ()
    missing: str = ""
    budgets: Mapping[Gpu, Budget] = field(default_factory=dict)

    def names(self, task: int) -> tuple[DeviceName, ...]:
        cpus = tuple(DeviceName(task, "CPU", index) for index in range(self.cpus))
        return cpus + tuple(DeviceName(task, "GPU", gpu.index) for gpu in self.gpus)

    @property
    def uuids(self) -> dict[int, str]:
        """Of GPUs, by index."""
        return {gpu.index: gpu.device.uuid for gpu in self.gpus}

    def shares(self, most: int, refused: Callable[[], None]) -> dict[Gpu, Budget]:
        """What a new session may have of each GPU's memory.

        Args:
            most: bytes; 0: three quarters of what clients may have. refused: as of `Budget`.
        """
        found: dict[Gpu, Budget] = {}
        for gpu, whole in self.budgets.items():
            limit = min(most or whole.limit * 3 // 4, whole.limit)
            found[gpu] = Share(whole, limit, refused, f"memory of GPU:{gpu.index}", "max_session_gpu_memory")
        return found

    def close(self) -> None:
        for gpu in self.gpus:
            gpu.close()


def real_cuda() -> Cuda:
    """The driver.

    Raises:
        CudaError: it is missing, or the bindings are.
    """
    try:
        from collectived_runtime.device.cuda.real import RealCuda
    except ImportError as error:
        raise CudaError("import cuda.bindings", -1, f"{error}: {_INSTALL}") from None
    return RealCuda()


def offer(text: str, cuda: GetCuda, lost: Callable[[str], object], driver: str = _DRIVER) -> Offer:
    """What `--devices` asks for: `auto`, `CPU:n` (so many CPUs, no GPU), or `GPU:0,1` by numbers or UUIDs.

    Args:
        lost: told why a GPU is of no use any more.
        driver: a file that is there where NVIDIA's driver is.

    Raises:
        ValueError: it asks for something else, or for a GPU that cannot be had.
    """
    kind, _, rest = text.partition(":")
    match kind.lower():
        case "auto" if not rest:
            try:
                return _with(chosen(cuda(), None, lost))
            except CudaError as error:
                return Offer(CPU_DEVICES, missing=str(error) if os.path.exists(driver) else "")
        case "cpu" if rest.isdecimal() and 1 <= int(rest) <= CPU_DEVICES:
            return Offer(int(rest))
        case "gpu" if rest:
            try:
                return _with(chosen(cuda(), [name.strip() for name in rest.split(",")], lost))
            except CudaError as error:
                raise ValueError(f"devices {text!r} cannot be offered: {error}") from None
    raise ValueError(
        f"devices must be 'auto', 'CPU:n' with n from 1 to {CPU_DEVICES}, or 'GPU:' with numbers or UUIDs such as "
        f"'GPU:0,1', got {text!r}"
    )


def _with(gpus: tuple[Gpu, ...]) -> Offer:
    budgets = {
        gpu: Budget(gpu.device.total_bytes // _SHARE, what=f"memory of GPU:{gpu.index} for clients", advice="free some")
        for gpu in gpus
    }
    return Offer(CPU_DEVICES, gpus, budgets=budgets)
