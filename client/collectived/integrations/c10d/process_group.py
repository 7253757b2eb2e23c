"""ProcessGroupCollectived: a process group of torch.distributed without other backends, and how one is made."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from collectived.integrations.c10d.backend import BackendCollectived, is_subclassable
from collectived.integrations.c10d.membership import NAME
from collectived.integrations.c10d.operations import Operations
from collectived.integrations.c10d.submission import Submission

_OURS = dist.ProcessGroup.BackendType.CUSTOM


class ProcessGroupOptions:
    """The `options` of a process group, as far as c10d reads them."""

    def __init__(self, timeout: timedelta) -> None:
        self.backend = NAME
        self._timeout = timeout


class ProcessGroupCollectived(Operations, dist.ProcessGroup):  # type: ignore[misc]  # torch is not there for mypy
    """A process group of torch.distributed whose ranks meet in a group of the service.

    PyTorch calls its methods without its dispatcher, and callers get the Work of this library. Questions of c10d beside
    operations are answered here, for c10d's own answers come from backends. Where PyTorch has backends of Python, there
    is one too: PyTorch asks it for the data that it records of a process group.
    """

    def __init__(self, store: Any, submission: Submission, name: str = "", description: str = "undefined") -> None:
        """`store` is c10d's, for this process group alone."""
        dist.ProcessGroup.__init__(self, submission.group.rank, submission.group.size)
        Operations.__init__(self, submission, name)
        self._store = store
        self._description = description
        self._backend: BackendCollectived | None = None
        if is_subclassable():
            self._backend = BackendCollectived(submission, name)
            self._set_default_backend(_OURS)
            for device in self._device_types:
                self._register_backend(device, _OURS, self._backend)
        self.setGroupName(name)
        self.setGroupDesc(description)

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    rank, size = getRank, getSize

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name
        if self._backend is not None:
            super()._set_group_name(name)

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: Any) -> ProcessGroupCollectived:
        return self

    get_backend = _get_backend

    @property
    def options(self) -> ProcessGroupOptions:
        return ProcessGroupOptions(self._submission.timeout)

    def _has_hooks(self) -> bool:
        return False

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroupCollectived | None:
        """A process group of some of these ranks, in that order; all call it, those that are not in it get None."""
        part = self._split(list(new_ranks), timeout)
        if not part.is_open:
            return None
        name = group_name or f"{self._name}:split:{min(new_ranks)}"
        return ProcessGroupCollectived(self._store, part, name, group_desc or "undefined")

    splitGroup = split_group

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier; as every operation here does, it names all ranks that are missing, to all ranks."""
        opts = c10d.BarrierOptions()
        opts.timeout = timeout or self._submission.timeout
        self.barrier(opts).wait()

    def __repr__(self) -> str:
        return f"<ProcessGroupCollectived {self._name!r}: rank {self._rank} of {self._size}>"


def create_backend(options: Any) -> ProcessGroupCollectived | BackendCollectived:
    """Return the object that runs this rank's operations, once all ranks have come.

    Args:
        options: c10d's `_DistributedBackendOptions`: store, group_rank, group_size, timeout, group_id, process_group.

    Raises:
        DistBackendError: no worker is there, or not all ranks have come within the timeout.
    """
    submission = Submission.join(options)
    if is_shared(options):
        return BackendCollectived(submission, options.group_id)
    return ProcessGroupCollectived(options.store, submission)


def is_shared(options: Any) -> bool:
    """Whether other backends carry some devices of the process group, as in `cpu:collectived,cuda:nccl`.

    PyTorch does not say so. But by now it has named the group after the backend of its GPUs, and has made the backends
    that stand before this one.
    """
    group = getattr(options, "process_group", None)
    if group is None or not is_subclassable():
        return False
    return group.name() != "custom" or bool(group._device_types)
