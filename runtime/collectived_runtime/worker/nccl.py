"""What a worker has of NCCL: the binding that it was told to use, or the first that can be loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collectived_proto.errors import FailedPreconditionError
from collectived_runtime.device.gpus import Gpu
from collectived_runtime.device.nccl.choose import choose
from collectived_runtime.device.nccl.communicators import Communicators
from collectived_runtime.device.nccl.interface import Nccl
from collectived_runtime.engine.meeting import Engine

log = logging.getLogger("collectived.worker")

AUTO = "auto"
GetNccl = Callable[[str], Nccl]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a worker has.

    Attributes:
        engine: for its lanes; None where it has no GPU or no NCCL.
        version: of NCCL, as NCCL counts; 0 for none.
        text: for people: `nccl4py, NCCL 2.28.9`, or why there is none.
    """

    engine: Engine | None = None
    version: int = 0
    text: str = ""

    def close(self) -> None:
        if self.engine is not None:
            self.engine.communicators.close()


def load(wanted: str, gpus: Sequence[Gpu], die: Callable[[str], object], get: GetNccl = choose) -> Loaded:
    """Loads NCCL where there are GPUs.

    Args:
        wanted: a binding; `auto`: the first that there is, or none.
        die: told that a call to NCCL does not return, which only the end of the process repairs.

    Raises:
        FailedPreconditionError: a binding was asked for by name, and is not there.
    """
    if not gpus:
        return Loaded()
    try:
        nccl = get("" if wanted == AUTO else wanted)
    except FailedPreconditionError as error:
        if wanted != AUTO:
            raise
        log.warning("NCCL is not used: %s", error)
        return Loaded(text=str(error))
    by_index = {gpu.index: gpu for gpu in gpus}

    def use(index: int) -> None:
        by_index[index].cuda.use(by_index[index].device.number)

    engine = Engine(Communicators(nccl, use, lambda what: die(f"NCCL: {what}")), by_index)
    version = nccl.version()
    return Loaded(engine, version, f"{nccl.name}, NCCL {spelled(version)}")


def spelled(version: int) -> str:
    """22809 as 2.28.9."""
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"
