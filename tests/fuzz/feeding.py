"""Feeding a parser: what it may raise is what it says; whatever else comes, or takes too long, is a defect."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass

from tests.fuzz.mutations import inputs
from tests.fuzz.parsers import Parser

SLOW_SECONDS = 5.0  # of processor time for one input of at most 4 KiB: a loop that an attacker can make long


@dataclass(frozen=True)
class Fed:
    """What came of it. `growth` is in bytes of resident memory, at its height."""

    inputs: int
    taken: int
    refused: int
    defects: tuple[str, ...]
    growth: int


def feed(parser: Parser, data: Iterable[bytes]) -> Fed:
    taken = refused = 0
    defects: list[str] = []
    before = _resident_peak()
    for one in data:
        started = time.process_time()
        try:
            parser.read(one)
            taken += 1
        except parser.refuses:
            refused += 1
        except Exception as error:  # the point of it all
            defects.append(f"{parser.name}: {type(error).__name__}: {error} of {one!r}")
        if time.process_time() - started > SLOW_SECONDS:
            defects.append(f"{parser.name}: more than {SLOW_SECONDS} s for {one!r}")
    return Fed(taken + refused + len(defects), taken, refused, tuple(defects), _resident_peak() - before)


def fuzz(parser: Parser, count: int, seed: int) -> Fed:
    return feed(parser, inputs(parser.seeds, count, seed))


def _resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
