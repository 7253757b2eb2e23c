"""Why a daemon cannot start, in words for whoever starts it."""

from __future__ import annotations


class StartupError(Exception):
    """A daemon cannot start as it was told to. The message says why, and what to do."""
