"""How the ranks of a process group come by the name of one group of the service."""

from __future__ import annotations

import re
import secrets
from typing import Any

_FIRST, _NAME = "collectived/first", "collectived/name"
_WORLD = "0"  # c10d's id of the process group of all ranks


def agree_on_name(store: Any, group_id: str) -> str:
    """Agree on a name that the ranks with this store have, and no others.

    The first rank leaves it in the store. A store that outlives a process group gives the same name to the next
    one: then ranks meet in the next generation of the group.

    Args:
        store: c10d's, for this process group alone. group_id: what c10d calls it, for people.
    """
    if store.add(_FIRST, 1) == 1:
        store.set(_NAME, secrets.token_hex(4))
    shown = "world" if group_id == _WORLD else re.sub(r"[^\w.:-]", "-", group_id)[:40]
    return f"torch/{shown}/{store.get(_NAME).decode()}"
