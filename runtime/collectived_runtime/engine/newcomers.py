"""Newcomers, as a lane takes part in agreeing on them: see `coordinator/newcomers.py` for the whole."""

from __future__ import annotations

import time

from collectived_proto.local import wire
from collectived_runtime.engine.ledger import Ledger
from collectived_runtime.engine.workshop import Workshop

PROMISE_SECONDS = 0.5  # longer than the coordinator takes to make something of it


class Newcomers:
    """Of one generation."""

    def __init__(self, shop: Workshop, ledger: Ledger) -> None:
        self._shop = shop
        self._ledger = ledger
        self._agreed: list[tuple[int, int]] = []  # from which instance on how many wait to join

    def promise(self) -> tuple[int, int]:
        """Starts nothing from the returned instance on until `agreed` is called, or for half a second.

        Also returns the first instance that no local rank has submitted.
        """
        following = 1 + max(standing.rung for standing in self._ledger.standings.values())
        return self._ledger.promise(time.monotonic() + PROMISE_SECONDS), following

    def agreed(self, from_instance: int, waiting: int) -> None:
        """So many wait to join, as the ranks are to see with that instance; -1: nothing has changed."""
        self._ledger.free()
        if from_instance >= 0:
            self._agreed.append((from_instance, waiting))

    def tell(self, number: int) -> None:
        """Before an instance runs: its ranks hear what was agreed for it."""
        while self._agreed and self._agreed[0][0] <= number:
            message = wire.waiting(self._agreed.pop(0)[1])
            for seat in self._shop.bells.seats.values():
                self._shop.bells.tell(seat, message)
