"""A long wait says every ten seconds that it goes on, for whom, and for how long at most."""

from __future__ import annotations

import time
from collections.abc import Callable

from collectived_launcher.launch.loop import Loop

EVERY = 10.0  # seconds


def until(loop: Loop, reached: Callable[[], bool], seconds: float, say: Callable[[str], None]) -> bool:
    """As `Loop.until`; `say` hears how long it has taken, such as `10 of 30 s`."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        if loop.until(reached, min(EVERY, seconds - passed)):
            return True
        if loop.signals:
            return False
        if (passed := time.monotonic() - began) < seconds:
            say(f"{passed:.0f} of {seconds:g} s")
    return reached()
