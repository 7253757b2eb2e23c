"""A rank's place in a group of torch.distributed: its timeout, how it splits off parts, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from collectived.group import Group
from collectived.integrations.c10d.errors import translate
from collectived.integrations.c10d.submission import Submission
from collectived_proto.errors import CollectiveError

NAME = "collectived"


class Membership:
    """Methods that are no operations, and that process groups and backends of c10d share."""

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = False

    def __init__(self, submission: Submission, name: str) -> None:
        """`name` is what c10d calls the group."""
        self._submission = submission
        self._rank = submission.group.rank
        self._size = submission.group.size
        self._name = name

    @property
    def _group(self) -> Group:
        return self._submission.group

    def getBackendName(self) -> str:
        return NAME

    name = _get_backend_name = getBackendName

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

    def _wait_for_pending_works(self) -> None:
        """Nothing to wait for: only hooks have works waited for, and there are none."""

    def abort(self) -> None:
        """End what is in flight, and every later operation, on all ranks, and leave the group."""
        self._submission.abort(f"rank {self._rank} aborted the process group {self._name!r}")

    def shutdown(self) -> None:
        """Leave the group; called by `destroy_process_group`."""
        self._submission.close(f"rank {self._rank} destroyed the process group {self._name!r} amid an operation")

    def _split(self, ranks: Sequence[int], timeout: timedelta | None) -> Submission:
        """That of a group of some of these ranks, in that order; all call it. It is not open on the others.

        Raises:
            DistBackendError: the ranks that came together did not all give the same list.
        """
        if self._rank not in ranks:
            return self._submission.split(None, 0, timeout)
        part = self._submission.split(min(ranks), ranks.index(self._rank), timeout)
        try:
            told = part.group.all_gather(np.array([ranks])).tolist()
        except CollectiveError as error:  # of other lengths
            part.close(str(error))
            raise translate(error) from error
        if part.group.size != len(ranks) or any(one != list(ranks) for one in told):
            part.close("the lists of ranks differ")
            raise dist.DistBackendError(
                f"the ranks of a part of process group {self._name!r} gave lists that differ: {told}, one of each"
                " rank: give the same list on all of them"
            )
        return part
