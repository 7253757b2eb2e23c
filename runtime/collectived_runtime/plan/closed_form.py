"""How long an all-reduce takes, in closed form: (hosts, bytes, model) -> seconds.

The same cost model as in `simulate`, one participant per host; the simulator agrees with these to the per cent.
"""

from __future__ import annotations

from collections.abc import Callable

from collectived_runtime.plan.cost_model import Model
from collectived_runtime.plan.double_tree import count_segments

ITEMSIZE = 4
"""Bytes per element, where a plan depends on elements."""


def _round(model: Model, nbytes: float, messages: int = 2, folded: float = 0.0) -> float:
    """One round: `nbytes` each way in so many messages, of which `folded` bytes are folded meanwhile."""
    transfer = max(nbytes / model.across.bandwidth, folded / model.fold)
    return model.across.latency + messages * model.overhead + transfer


def _ring(hosts: int, nbytes: int, model: Model) -> float:
    piece = nbytes / hosts
    return (hosts - 1) * (_round(model, piece, folded=piece) + _round(model, piece))


def _tree(hosts: int, nbytes: int, model: Model) -> float:
    return (hosts - 1).bit_length() * (_round(model, nbytes, 1, nbytes) + _round(model, nbytes, 1))


def _halving_doubling(hosts: int, nbytes: int, model: Model) -> float:
    levels = hosts.bit_length() - 1
    guests = _tree(2, nbytes, model) if hosts > 1 << levels else 0.0
    halves = (nbytes / (1 << level) for level in range(1, levels + 1))
    return guests + sum(_round(model, half, folded=half) + _round(model, half) for half in halves)


def _shuffle(hosts: int, nbytes: int, model: Model) -> float:
    piece, others = nbytes / hosts, hosts - 1
    if not others:
        return 0.0
    return others * _round(model, piece, folded=piece) + _round(model, others * piece, 2 * others)


def _double_tree(hosts: int, nbytes: int, model: Model) -> float:
    """A round moves up to three segments each way once the trees are full, one while they fill and drain.

    The one form here that is an estimate: small trees do better, by up to half.
    """
    if hosts == 1:
        return 0.0
    segments = count_segments(nbytes // ITEMSIZE)
    segment = nbytes / 2 / segments
    filling = 2 * (2 * (hosts.bit_length() - 1) - 1)
    full = 2 * (segments - 1)
    return full * _round(model, 3 * segment, 5, segment) + (filling + 2) * _round(model, segment, 2, segment)


def _one_shot(hosts: int, nbytes: int, model: Model) -> float:
    others = hosts - 1
    return _round(model, others * nbytes, 2 * others, others * nbytes) if others else 0.0


TIMES: dict[str, Callable[[int, int, Model], float]] = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "double_tree": _double_tree,
    "shuffle": _shuffle,
    "one_shot": _one_shot,
}
"""Predicted seconds of an all-reduce: (hosts, bytes, model)."""
