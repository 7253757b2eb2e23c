"""Errors of the service as programs written for c10d catch them."""

from __future__ import annotations

import torch.distributed as dist

from collectived_proto.errors import CollectiveError, DeadlineExceededError


def translate(error: CollectiveError) -> Exception:
    """A `DistBackendError`, which is a RuntimeError; its cause is `error`, which says more.

    A timeout says " Timed out ", as Gloo does: programs look for it.
    """
    said = f"[collectived] Timed out waiting: {error}" if isinstance(error, DeadlineExceededError) else str(error)
    translated: Exception = dist.DistBackendError(said)
    translated.__cause__ = error
    return translated
