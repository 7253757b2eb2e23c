"""AUTO: which algorithm carries how many bytes, as one table per generation.

The table is made once, by the coordinator, from the *topology*, and handed to all, so that all choose alike whatever
they measure themselves. A *row* holds up to a number of bytes. `closed_form` says how long each algorithm takes, with
one vector per host crossing the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from math import ceil

from collectived_runtime.plan.closed_form import TIMES
from collectived_runtime.plan.cost_model import Model

ANY_SIZE = -1
LARGEST = 1 << 34
MIN_SHARDED_BYTES = 1 << 20
"""Smaller vectors are not worth more than one connection."""
AMORTISED = 1.25
"""A pack is large enough when latency adds no more than a quarter to the time its bytes take."""


@dataclass(frozen=True, slots=True)
class HostLayout:
    """Ranks per host, and what the links between them are like."""

    hosts: tuple[int, ...]
    model: Model = Model()


@dataclass(frozen=True, slots=True)
class Row:
    """Vectors of up to `limit` bytes (REST: of any size); `bytes_per_pack` is the size where none was asked for."""

    limit: int
    algorithm: str
    shards: int
    bytes_per_pack: int

    def __str__(self) -> str:
        size = "more" if self.limit == ANY_SIZE else f"up to {self.limit} bytes"
        return f"{size}: {self.algorithm}, {self.shards} shards, packs of {self.bytes_per_pack} bytes"


Table = tuple[Row, ...]


def choose(topology: HostLayout, among: Iterable[str] = ()) -> Table:
    """The table of a generation: for each power of two the algorithm that the model finds fastest.

    Equal times go to the algorithm named first, and neighbouring rows that say the same are one.

    Args:
        topology: hosts and links.
        among: names of algorithms to choose from, by default all of `TIMES`.
    """
    return _choose(len(topology.hosts), topology.model, tuple(among) or tuple(TIMES))


@lru_cache(maxsize=64)
def _choose(hosts: int, model: Model, names: tuple[str, ...]) -> Table:
    """Remembered, because most groups of a job are of as many hosts, and a table takes milliseconds."""
    rows: list[Row] = []
    nbytes = 1
    while nbytes <= LARGEST:
        best = min(names, key=lambda name: TIMES[name](hosts, nbytes, model))
        row = Row(nbytes, best, _shards(hosts, nbytes, model), 0)
        if rows and (rows[-1].algorithm, rows[-1].shards) == (row.algorithm, row.shards):
            rows.pop()
        rows.append(row)
        nbytes *= 2
    rows.append(replace(rows.pop(), limit=ANY_SIZE))
    pack = _bytes_per_pack(hosts, rows[-1].algorithm, model)
    return tuple(replace(row, bytes_per_pack=pack) for row in rows)


def select_row(table: Sequence[Row], nbytes: int) -> Row:
    """Return the row for a vector of that many bytes."""
    return next(row for row in table if row.limit == ANY_SIZE or nbytes <= row.limit)


def digest(table: Sequence[Row]) -> bytes:
    """Eight bytes that are equal for equal tables, in every process."""
    return blake2b("\n".join(map(str, table)).encode(), digest_size=8).digest()


def _shards(hosts: int, nbytes: int, model: Model) -> int:
    """Return as many connections as fill the link."""
    return 1 if hosts == 1 or nbytes < MIN_SHARDED_BYTES else max(1, ceil(model.across.bandwidth / model.stream))


def _bytes_per_pack(hosts: int, algorithm: str, model: Model) -> int:
    """The smallest power of two from 1 to 64 MiB at which `algorithm` is busy with bytes; 0 on one host."""
    if hosts == 1:
        return 0
    time = TIMES[algorithm]
    sizes = (1 << exponent for exponent in range(20, 26))
    return next(
        (n for n in sizes if time(hosts, n, model) < AMORTISED * (time(hosts, 2 * n, model) - time(hosts, n, model))),
        64 << 20,
    )
