"""The error of a daemon that cannot start, in words for its user."""

from __future__ import annotations


class StartupError(Exception):
    """A daemon cannot start as it is configured. The message says why, and what to do."""
