"""The devices of a worker: virtual CPUs always, and the GPUs that are configured or found.

NCCL of a worker: the configured binding, or the first that can be loaded.

The default limit of a worker's memory.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from collectived_proto.devices import DeviceName
from collectived_proto.errors import FailedPreconditionError
from collectived_runtime.device.cuda.driver import Cuda, CudaError
from collectived_runtime.device.gpus import Gpu, select_gpus
from collectived_runtime.device.nccl.binding import load_binding
from collectived_runtime.device.nccl.communicators import Communicators
from collectived_runtime.device.nccl.interface import Nccl
from collectived_runtime.engine.base.lent import MemoryUser
from collectived_runtime.engine.base.memory_budget import MemoryBudget, SessionBudget
from collectived_runtime.engine.gpu.communicator import NcclContext

CPU_DEVICES = 8
EXIT_GPU_LOST = 70  # exit status
GPU_LOST_SECONDS = 1.0  # in which ranks get the error
_CLIENT_MEMORY_DIVISOR = 2  # one part in so many of a GPU's memory may be its clients'
_KEPT_BY = "kept after they were given back, by it or by its user's processes"
_DRIVER = "/proc/driver/nvidia/version"  # there where NVIDIA's driver is loaded
_INSTALL = "pip install 'collectived[cuda12]', or [cuda13] for CUDA 13"

GetCuda = Callable[[], Cuda]


@dataclass(frozen=True, slots=True)
class DeviceOffer:
    """The devices that a worker offers.

    Attributes:
        unavailable_reason: why GPUs that are there are not offered; "" where nothing is missing.
        budgets: of the memory that clients are given of each GPU.
    """

    cpus: int
    gpus: tuple[Gpu, ...] = ()
    unavailable_reason: str = ""
    budgets: Mapping[Gpu, MemoryBudget] = field(default_factory=dict)

    def device_names(self, task: int) -> tuple[DeviceName, ...]:
        cpus = tuple(DeviceName(task, "CPU", index) for index in range(self.cpus))
        return cpus + tuple(DeviceName(task, "GPU", gpu.index) for gpu in self.gpus)

    @property
    def uuids(self) -> dict[int, str]:
        """UUIDs of GPUs, by index."""
        return {gpu.index: gpu.device.uuid for gpu in self.gpus}

    def create_session_budgets(
        self, most: int, refused: Callable[[], None], find_user: Callable[[Gpu], MemoryUser]
    ) -> dict[Gpu, SessionBudget]:
        """Make the budgets of a new session for each GPU's memory.

        Args:
            most: bytes; 0: three quarters of what clients may have. refused: as of `MemoryBudget`.
            find_user: whose the session is, as far as memory of that GPU is concerned.
        """
        found: dict[Gpu, SessionBudget] = {}
        for gpu, whole in self.budgets.items():
            limit = min(most or whole.limit * 3 // 4, whole.limit)
            what, key = f"memory of GPU:{gpu.index}", "max_session_gpu_memory"
            found[gpu] = SessionBudget(whole, limit, refused, what, key, find_user(gpu), _KEPT_BY)
        return found

    def close(self) -> None:
        for gpu in self.gpus:
            gpu.close()


def load_cuda() -> Cuda:
    """The driver.

    Raises:
        CudaError: it is missing, or the bindings are.
    """
    try:
        from collectived_runtime.device.cuda.driver_cuda import DriverCuda
    except ImportError as error:
        raise CudaError("import cuda.bindings", -1, f"{error}: {_INSTALL}") from None
    return DriverCuda()


def discover_devices(text: str, cuda: GetCuda, lost: Callable[[str], object], driver: str = _DRIVER) -> DeviceOffer:
    """Find the devices for `--devices`: `auto`, `CPU:n` (so many CPUs, no GPU), or `GPU:0,1` by numbers or UUIDs.

    Args:
        lost: called with the reason why a GPU cannot be used any more.
        driver: a file that is there where NVIDIA's driver is.

    Raises:
        ValueError: it asks for something else, or for a GPU that cannot be had.
    """
    kind, _, rest = text.partition(":")
    match kind.lower():
        case "auto" if not rest:
            try:
                return _make_offer(select_gpus(cuda(), None, lost))
            except CudaError as error:
                return DeviceOffer(CPU_DEVICES, unavailable_reason=str(error) if os.path.exists(driver) else "")
        case "cpu" if rest.isdecimal() and 1 <= int(rest) <= CPU_DEVICES:
            return DeviceOffer(int(rest))
        case "gpu" if rest:
            try:
                return _make_offer(select_gpus(cuda(), [name.strip() for name in rest.split(",")], lost))
            except CudaError as error:
                raise ValueError(f"devices {text!r} cannot be offered: {error}") from None
    raise ValueError(
        f"devices must be 'auto', 'CPU:n' with n from 1 to {CPU_DEVICES}, or 'GPU:' with numbers or UUIDs such as "
        f"'GPU:0,1', got {text!r}"
    )


def _make_offer(gpus: tuple[Gpu, ...]) -> DeviceOffer:
    budgets = {
        gpu: MemoryBudget(
            gpu.device.total_bytes // _CLIENT_MEMORY_DIVISOR,
            what=f"memory of GPU:{gpu.index} for clients",
            advice="free some",
        )
        for gpu in gpus
    }
    return DeviceOffer(CPU_DEVICES, gpus, budgets=budgets)


log = logging.getLogger("collectived.worker")

AUTO = "auto"
GetNccl = Callable[[str], Nccl]


@dataclass(frozen=True, slots=True)
class LoadedNccl:
    """The loaded NCCL of a worker.

    Attributes:
        context: for its group loops; None where it has no GPU or no NCCL.
        version: of NCCL, as NCCL counts; 0 for none.
        description: for people: `nccl4py, NCCL 2.28.9`, or why there is none.
    """

    context: NcclContext | None = None
    version: int = 0
    description: str = ""

    def close(self) -> None:
        if self.context is not None:
            self.context.communicators.close()


def load_nccl(
    wanted: str, gpus: Sequence[Gpu], die: Callable[[str], object], get: GetNccl = load_binding
) -> LoadedNccl:
    """Load NCCL where there are GPUs.

    Args:
        wanted: a binding; `auto`: the first that there is, or none.
        die: called where a call to NCCL does not return, which only the end of the process repairs.

    Raises:
        FailedPreconditionError: a binding was asked for by name, and is not there.
    """
    if not gpus:
        return LoadedNccl()
    try:
        nccl = get("" if wanted == AUTO else wanted)
    except FailedPreconditionError as error:
        if wanted != AUTO:
            raise
        log.warning("NCCL is not used: %s", error)
        return LoadedNccl(description=str(error))
    by_index = {gpu.index: gpu for gpu in gpus}

    def use(index: int) -> None:
        by_index[index].cuda.set_device(by_index[index].device.number)

    engine = NcclContext(Communicators(nccl, use, lambda what: die(f"NCCL: {what}")), by_index)
    version = nccl.version()
    return LoadedNccl(engine, version, f"{nccl.name}, NCCL {format_version(version)}")


def format_version(version: int) -> str:
    """Format 22809 as 2.28.9."""
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"


def default_memory_limit(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Half of the memory that this process may use: of the machine's, or of the least that a cgroup above it has."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in (*_limits_above(cgroups, own), cgroups / "memory" / "memory.limit_in_bytes"):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such controller here, or no limit ("max")
            continue
    return min(limits) // 2


def _limits_above(cgroups: Path, own: Path) -> Iterator[Path]:
    """Where version 2 keeps the limits: of the process's own cgroup, as `MemoryMax=` sets it, and of those above it.

    In a container its own is the root, as far as it can see.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for name in [line.removeprefix("0::/") for line in lines if line.startswith("0::/")] or [""]:
        folder = cgroups / name
        for above in (folder, *folder.parents):
            if above == cgroups or cgroups in above.parents:
                yield above / "memory.max"


def exit_for_restart(why: str) -> None:
    """End this process, to which a GPU is lost, after its group loops have notified their ranks."""
    log.critical("%s; this worker ends, for its supervisor to start it again", why)
    ending = threading.Timer(GPU_LOST_SECONDS, os._exit, (EXIT_GPU_LOST,))  # even if a thread hangs in the driver
    ending.daemon = True
    ending.start()
