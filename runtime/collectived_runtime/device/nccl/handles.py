"""Communicators of a binding, by the integers that stand for them here."""

from __future__ import annotations

import itertools
from typing import Generic, TypeVar

from collectived_runtime.device.nccl.interface import NcclResult, NcclUsageError

T = TypeVar("T")


class HandleTable(Generic[T]):
    """May be used from any thread.

    Bindings differ in what they do with a communicator that has been freed; some pass a null pointer on. Here the
    number of one that is gone is refused.
    """

    def __init__(self) -> None:
        self._all: dict[int, T] = {}
        self._numbers = itertools.count(1)

    def add(self, one: T) -> int:
        number = next(self._numbers)
        self._all[number] = one
        return number

    def __getitem__(self, number: int) -> T:
        try:
            return self._all[number]
        except KeyError:
            raise _freed_error(number) from None

    def pop(self, number: int) -> T:
        try:
            return self._all.pop(number)
        except KeyError:
            raise _freed_error(number) from None


def _freed_error(number: int) -> NcclUsageError:
    return NcclUsageError(NcclResult.INVALID_ARGUMENT, f"communicator {number}", "it has been freed, or never was")
