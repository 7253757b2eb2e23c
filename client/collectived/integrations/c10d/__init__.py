"""torch.distributed's process groups, carried out by groups of the service.

`torch.distributed.init_process_group("collectived")` comes here, through the entry point in `collectived_torch`.
"""

from __future__ import annotations

from collectived.integrations.c10d.process_group import ProcessGroupCollectived, create_backend

__all__ = ["ProcessGroupCollectived", "create_backend"]
