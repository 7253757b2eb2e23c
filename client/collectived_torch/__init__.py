"""The entry point `torch.backends`, which `import torch` calls: it registers the backend `collectived`.

It imports nothing but PyTorch, for most programs that import torch never use this backend. It raises nothing, for that
would break `import torch` for every program. Errors are raised by `init_process_group("collectived")`.
"""

from __future__ import annotations

import contextlib
from typing import Any

NAME = "collectived"
DEVICES = ["cpu", "cuda"]


def create_backend(options: Any, backend_options: Any = None) -> Any:
    """A process group, or a backend, as `torch.distributed.Backend.register_backend` wants it (`extended_api`)."""
    from collectived.integrations import c10d

    return c10d.create_backend(options)


def register() -> None:
    """Make `collectived` known to torch.distributed; again is no harm."""
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_available() and not hasattr(dist.Backend, NAME.upper()):
            dist.Backend.register_backend(NAME, create_backend, extended_api=True, devices=DEVICES)
