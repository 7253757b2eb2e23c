"""BackendCollectived: what carries the operations of a process group of PyTorch's own, for some kinds of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from collectived.integrations.c10d.membership import NAME
from collectived.integrations.c10d.operations import Operations
from collectived.integrations.c10d.submission import Submission


class BackendCollectived(Operations, c10d.Backend):  # type: ignore[misc]  # torch is not there for the type checker
    """Tensors of one kind of device, as in `cpu:collectived,cuda:nccl`.

    PyTorch calls it through its dispatcher, and gives callers a Work that can be waited for and has a future, and no
    more. A process group without other backends is a `ProcessGroupCollectived` instead.
    """

    def __init__(self, submission: Submission, name: str) -> None:
        c10d.Backend.__init__(self, submission.group.rank, submission.group.size)
        Operations.__init__(self, submission, name)

    @property
    def options(self) -> Any:
        return c10d.Backend.Options(NAME, timeout=self._submission.timeout)

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> BackendCollectived:
        """A backend of some of these ranks, in that order; all call it.

        Raises:
            DistBackendError: this rank is in none. PyTorch would end the process at None.
        """
        part = self._split(list(ranks), opts._timeout)
        if not part.is_open:
            raise dist.DistBackendError(
                f"rank {self._rank} is in no part of split_group, which PyTorch cannot express where several backends"
                f" carry a process group: give it a part of its own, [{self._rank}], or use new_group"
            )
        return BackendCollectived(part, f"{self._name}:split:{min(ranks)}")

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """A barrier; as every operation here does, it names all ranks that are missing, to all ranks."""
        self.barrier(opts).wait()


def is_subclassable() -> bool:
    """Whether this PyTorch lets Python write backends, and not process groups alone: so since 2.14."""
    try:
        c10d.Backend(0, 1)
    except TypeError:
        return False
    return True
