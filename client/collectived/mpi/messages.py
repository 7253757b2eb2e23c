"""Buffers as mpi4py's calls take them: an object with memory, alone or with counts, displacements and a datatype."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from collectived.mpi.constants import IN_PLACE
from collectived.values.leaves import Array, UnknownLeaf, kind_of, writable_view

_FORMS = "an array, [array, count, datatype], or [array, (counts, displacements), datatype]"


@dataclass(frozen=True, slots=True)
class Blocks:
    """A block of elements for each rank: `counts[r]` of them, from `displacements[r]` on."""

    elements: Array
    counts: tuple[int, ...]
    displacements: tuple[int, ...]

    def get(self, rank: int) -> Array:
        """The block of one rank: a view."""
        start = self.displacements[rank]
        return self.elements[start : start + self.counts[rank]]

    @property
    def span(self) -> Array | None:
        """All blocks as one view, where each begins at the end of the one before; else None."""
        ends = [start + count for start, count in zip(self.displacements, self.counts, strict=True)]
        if any(start != end for start, end in zip(self.displacements[1:], ends[:-1], strict=True)):
            return None
        return self.elements[self.displacements[0] : ends[-1]]

    def join(self) -> Array:
        """All blocks one behind the other: a view where they lie so."""
        span = self.span
        return np.concatenate([self.get(rank) for rank in range(len(self.counts))]) if span is None else span

    def put(self, joined: Array) -> None:
        """Write what `join` would give into the blocks."""
        starts = [0, *accumulate(self.counts)]
        for rank, count in enumerate(self.counts):
            self.get(rank)[...] = joined[starts[rank] : starts[rank] + count]


def is_in_place(buffer: object) -> bool:
    """Whether the other buffer of a call is meant; None means the same."""
    return buffer is None or buffer is IN_PLACE


def read_elements(buffer: Any, name: str, *, writes: bool = False) -> Array:
    """The elements that a buffer names, as a flat view of its memory.

    Args:
        name: of the argument, for errors. writes: whether the call writes into it.

    Raises:
        TypeError: it is no buffer. ValueError: it cannot be written, its memory has gaps, or it is too short.
    """
    elements, where = _split(buffer, name, writes)
    if not where:
        return elements
    if len(where) > 1 or isinstance(where[0], Iterable):
        raise TypeError(f"{name} takes one count, for it goes to or comes from one rank, got {where!r}")
    count = _read_count(where[0], name)
    _check_end(count, elements, name)
    return elements[:count]


def read_blocks(buffer: Any, size: int, name: str, *, writes: bool = False) -> Blocks:
    """The blocks for `size` ranks that a buffer names; without counts it is cut into equal ones.

    Raises:
        TypeError: it is no buffer, or counts are not numbers. ValueError: it cannot be cut so, cannot be written, has
            gaps, or is too short.
    """
    elements, where = _split(buffer, name, writes)
    if len(where) == 1 and isinstance(where[0], tuple):  # a list would be counts alone
        where = where[0]
    if len(where) > 2:
        raise TypeError(f"{name} takes counts and displacements, got {where!r}: {_FORMS}")
    counts = _read_counts(where[0] if where else None, elements, size, name)
    displacements = _read_displacements(where[1] if len(where) > 1 else None, counts, name)
    for start, count in zip(displacements, counts, strict=True):
        _check_end(start + count, elements, name)
    return Blocks(elements, counts, displacements)


def _split(buffer: Any, name: str, writes: bool) -> tuple[Array, Sequence[Any]]:
    """The memory as flat elements of its datatype, and what is said of counts."""
    parts = list(buffer) if isinstance(buffer, (list, tuple)) else [buffer]
    if not 1 <= len(parts) <= 4:
        raise TypeError(f"{name} must be {_FORMS}, got {buffer!r}")
    memory, *where = parts
    datatype = where.pop() if where and (where[-1] is None or isinstance(where[-1], (np.dtype, str, type))) else None
    elements = np.empty(0, np.uint8) if memory is None else _flatten(memory, name, writes)
    if datatype is not None:
        dtype = np.dtype(datatype)
        if elements.nbytes % dtype.itemsize:
            raise ValueError(f"{name} has {elements.nbytes} bytes, which are no whole number of {dtype}")
        elements = elements.view(dtype)
    return elements, [part for part in where if part is not None]


def _flatten(memory: Any, name: str, writes: bool) -> Array:
    try:
        if isinstance(memory, np.ndarray):
            array = memory
        elif hasattr(type(memory), "__dlpack__") or hasattr(type(memory), "__cuda_array_interface__"):
            kind = kind_of(memory)
            if kind.is_device:
                raise TypeError(f"{name} lies on a GPU: use the calls of comm.group, such as all_reduce, which take it")
            array = writable_view(memory) if writes else kind.to_array(memory)
        else:
            array = np.asarray(memoryview(memory))
    except (TypeError, UnknownLeaf) as error:
        raise TypeError(f"{name} must be {_FORMS}, got a {type(memory).__name__}: {error}") from None
    if not array.flags.forc:
        raise ValueError(f"{name} has gaps in its memory: give numpy.ascontiguousarray of it, or a copy")
    if writes and not array.flags.writeable:
        raise ValueError(f"{name} is read-only: the call writes into it")
    return array.ravel(order="K")


def _read_count(given: Any, name: str) -> int:
    try:
        count = operator.index(given)
    except TypeError:
        raise TypeError(f"counts and displacements of {name} must be whole numbers, got {given!r}") from None
    if count < 0:
        raise ValueError(f"counts and displacements of {name} must not be negative, got {count}")
    return count


def _read_counts(given: Any, elements: Array, size: int, name: str) -> tuple[int, ...]:
    if given is None:
        if len(elements) % size:
            raise ValueError(f"{name} has {len(elements)} elements, which cannot be cut evenly for {size} ranks")
        return (len(elements) // size,) * size
    if not isinstance(given, Iterable):
        return (_read_count(given, name),) * size
    return _read_list(given, size, f"counts of {name}", name)


def _read_displacements(given: Any, counts: tuple[int, ...], name: str) -> tuple[int, ...]:
    if given is None:
        return (0, *accumulate(counts[:-1]))
    if not isinstance(given, Iterable):
        stride = _read_count(given, name)
        return tuple(stride * rank for rank in range(len(counts)))
    return _read_list(given, len(counts), f"displacements of {name}", name)


def _read_list(given: Iterable[Any], size: int, what: str, name: str) -> tuple[int, ...]:
    numbers = tuple(_read_count(number, name) for number in given)
    if len(numbers) != size:
        raise ValueError(f"{what} must be one for each of the {size} ranks, got {len(numbers)}: {list(numbers)}")
    return numbers


def _check_end(end: int, elements: Array, name: str) -> None:
    if end > len(elements):
        raise ValueError(f"{name} has {len(elements)} elements of {elements.dtype}, and {end} are asked for")
