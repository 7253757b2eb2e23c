"""Arguments of c10d's methods, in the forms in which callers pass them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from collectived.integrations.c10d.tensors import Tensor, carried_length


def read_options(kind: Any, given: Any = None, timeout: timedelta | None = None, **fields: Any) -> Any:
    """c10d's options of that kind. In their place callers may give a root, a reduce op or a timeout, or nothing.

    Args:
        fields: of the options, as far as they are not None.
    """
    if hasattr(given, "timeout"):
        return given
    if isinstance(given, timedelta):
        fields["timeout"] = given
    elif isinstance(given, int):
        fields["rootRank"] = given
    elif given is not None:
        fields["reduceOp"] = given
    made = kind()
    for name, value in {"timeout": timeout, **fields}.items():
        if value is not None:
            setattr(made, name, value)
    return made


def listed(tensors: Any) -> Any:
    """Tensors, where callers may give one alone."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def nested(several: Any, one: Any) -> tuple[Any, Any]:
    """A list for each rank and what belongs to it, where callers may give both without the list around them."""
    return ([several], [one]) if isinstance(one, torch.Tensor) else (several, one)


def check_split(sizes: Sequence[int], rows: int, ranks: int) -> None:
    """Whether rows are cut as an all-to-all needs them; without sizes they are dealt evenly.

    Raises:
        ValueError: they are not.
    """
    if sizes and sum(sizes) != rows:
        raise ValueError(f"Split sizes doesn't match total dim 0 size: {list(sizes)} of {rows} rows")
    if not sizes and rows % ranks:
        raise ValueError(f"Tensor's dim 0 does not divide equally across group size: {rows} rows, {ranks} ranks")


def count_elements(sizes: Sequence[int], total: int, rows: int, ranks: int) -> list[int]:
    """By rank, where sizes are rows; without sizes rows are dealt evenly."""
    row = total // rows if rows else 0
    return [count * row for count in sizes or [rows // ranks] * ranks]


def check_own_part(rank: int, sent: Sequence[int], rooms: Sequence[int]) -> None:
    """Whether there is room for what a rank sends to itself in an all-to-all: sizes that are mixed up show there.

    Raises:
        ValueError: there is more or less.
    """
    if len(rooms) != len(sent) or rooms[rank] != sent[rank]:
        raise ValueError(
            f"rank {rank} sends {list(sent)} elements to the ranks, and has room for {list(rooms)} from them:"
            f" expected as many of rank {rank} itself in both"
        )


def is_even(outputs: Sequence[Tensor], length: int, ranks: int) -> bool:
    """Whether outputs, one for each rank or one for all, are for as many elements of every rank."""
    if len(outputs) == 1:
        return carried_length(outputs[0]) == length * ranks
    return len(outputs) == ranks and all(carried_length(output) == length for output in outputs)


def check_lengths(outputs: Sequence[Tensor], lengths: Sequence[int]) -> None:
    """Whether each rank gave what its output takes. One output takes what all of them gave together.

    Raises:
        ValueError: it did not.
    """
    expected = [carried_length(output) for output in outputs]
    if len(expected) == 1 and sum(lengths) == expected[0]:
        return
    for rank, (length, room) in enumerate(zip(lengths, expected, strict=False)):
        if length != room:
            raise ValueError(f"rank {rank} gave {length} elements, but its output takes {room}: give one that fits")
    if len(lengths) != len(expected):
        raise ValueError(f"{len(lengths)} ranks gave tensors, but there are {len(expected)} outputs: give one for each")
