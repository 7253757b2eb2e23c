"""Free memory that goes back to the kernel.

glibc keeps what requests of many sizes have left behind: a few small blocks that live on pin all that is free around
them, tens of MiB after a guest that described large values.
"""

from __future__ import annotations

import asyncio
import ctypes

TRIM_DELAY_SECONDS = 2.0  # after the first wish: what is being freed by then goes too


class HeapTrimmer:
    """Gives free memory back a while after it is asked to, beside the event loop, and once for many wishes."""

    def __init__(self, delay: float = TRIM_DELAY_SECONDS) -> None:
        self._delay = delay
        self._trimming: asyncio.Task[None] | None = None
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone

    def schedule(self) -> None:
        """Wish for it. Called in the event loop."""
        if self._trim is not None and (self._trimming is None or self._trimming.done()):
            self._trimming = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        await asyncio.sleep(self._delay)
        assert self._trim is not None
        await asyncio.to_thread(self._trim, ctypes.c_size_t(0))
