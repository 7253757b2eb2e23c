"""What c10d asks of a process group beside operations: c10d's own answers come from backends, and this has none."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collectived.group import Group
from collectived.integrations.c10d.submission import Submission

NAME = "collectived"


class ProcessGroupOptions:
    """What `options` of a process group gives, as far as c10d looks at it."""

    def __init__(self, timeout: timedelta) -> None:
        self.backend = NAME
        self._timeout = timeout


class ProcessGroupIdentity(dist.ProcessGroup):  # type: ignore[misc]  # torch is not there for the type checker
    """A member of a process group: who it is, its timeout, and how it ends."""

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, store: Any, submission: Submission) -> None:
        """`store` is c10d's, for this process group alone."""
        self._rank = submission.group.rank
        self._size = submission.group.size
        super().__init__(self._rank, self._size)
        self._store = store
        self._name = ""
        self._description = "undefined"
        self._submission = submission

    @property
    def _group(self) -> Group:
        return self._submission.group

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return NAME

    rank, size, name, _get_backend_name = getRank, getSize, getBackendName, getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

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

    def _get_backend(self, device: Any) -> ProcessGroupIdentity:
        return self

    @property
    def options(self) -> ProcessGroupOptions:
        return ProcessGroupOptions(self._submission.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._submission.timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._submission.sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._submission.sequence

    def eager_connect_single_device(self, device: Any) -> None:
        """Nothing to do: ranks have met when a process group exists."""

    def perform_nocolor_split(self, device: Any) -> None:
        """Nothing to do: new groups are joined by their own ranks alone."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Nothing to wait for: only hooks have works waited for, and there are none."""

    def abort(self) -> None:
        """End what is in flight, and every later operation, on all ranks."""
        if self._submission.is_open:
            self._group.abort(f"rank {self._rank} aborted the process group {self._name!r}")

    def __repr__(self) -> str:
        return f"<ProcessGroupCollectived {self._name!r}: rank {self._rank} of {self._size}>"
