"""Targets: what a caller gives as `out=`, into which results are copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collectived.arguments import escape_surrogates
from collectived.values import nest
from collectived.values.leaves import Array, UnknownLeaf, writable_view


class Targets(NamedTuple):
    """The caller's `out`, which is returned, its leaves, and arrays through which they are written."""

    whole: object
    spec: nest.Spec
    leaves: list[Any]
    views: list[Array]


def flatten_out(out: object) -> Targets:
    """`out` taken apart.

    Raises:
        TypeError: a leaf of it is no array. ValueError: it cannot be written.
    """
    spec, leaves = nest.flatten(out)
    views = []
    for number, leaf in enumerate(leaves):
        try:
            views.append(writable_view(leaf))
        except (UnknownLeaf, ValueError) as error:
            where = f"out{nest.paths(spec)[number]}"
            raise (TypeError if isinstance(error, UnknownLeaf) else ValueError)(f"{where} is {error}") from None
    return Targets(out, spec, leaves, views)


def check_fits(targets: Targets, structure: str, types: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]) -> None:
    """
    Args:
        structure, types: of the result, dtype and shape of each leaf; a length of -1 is not known yet, and fits all.

    Raises:
        ValueError: the targets are others; of any byte order.
    """
    given = escape_surrogates(nest.structure(targets.spec))
    if given != structure:
        raise ValueError(f"out has the structure {given}, expected {structure}")
    for number, (view, (dtype, shape)) in enumerate(zip(targets.views, types, strict=True)):
        if not _has_shape(view, shape) or (view.dtype != dtype and view.dtype.newbyteorder("=") != dtype):
            where = f"out{nest.paths(targets.spec)[number]}"
            lengths = ", ".join("?" if length < 0 else str(length) for length in shape)
            raise ValueError(f"{where} is {view.dtype}{list(view.shape)}, the result is {dtype}[{lengths}]")


def _has_shape(view: Array, shape: tuple[int, ...]) -> bool:
    return view.shape == shape or (
        view.ndim == len(shape) and all(length in (-1, own) for length, own in zip(shape, view.shape, strict=True))
    )
