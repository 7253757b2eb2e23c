"""Why a daemon cannot start: raised by whatever part finds out, printed by the daemon."""

from __future__ import annotations


class CannotStart(Exception):
    """Why a daemon cannot start, for people."""
