"""How long an all-reduce takes, in closed form: (hosts, bytes, model) -> seconds.

The same cost model as in `simulate`, one participant per host. Where each host has processors of its own, the simulator
agrees with these to the per cent, but for `double_tree`. Where hosts share processors, these are estimates: within a
factor of two, but for `double_tree`.
"""

from __future__ import annotations

from collections.abc import Callable

from collectived_runtime.plan.cost_model import Model
from collectived_runtime.plan.double_tree import count_segments

ITEMSIZE = 4
"""Bytes per element, where a plan depends on elements."""


def _round(model: Model, sent: float, received: float, messages: int, folded: float = 0.0, busy: float = 1.0) -> float:
    """A round of the part `busy` of all hosts, by what one of them sends, receives and folds meanwhile."""
    transfer = max(model.transfer_seconds(sent, received, busy), folded / model.fold)
    return model.across.latency + model.message_seconds(messages, busy) + transfer


def _exchange(model: Model, nbytes: float, messages: int = 2, folded: float = 0.0, busy: float = 1.0) -> float:
    """A round in which so many bytes go each way."""
    return _round(model, nbytes, nbytes, messages, folded, busy)


def _level(model: Model, nbytes: float, busy: float) -> float:
    """A level of a tree, up and down: of each pair one sends and one receives."""
    return _round(model, 0, nbytes, 1, nbytes, busy) + _round(model, 0, nbytes, 1, busy=busy)


def _ring(hosts: int, nbytes: int, model: Model) -> float:
    piece = nbytes / hosts
    return (hosts - 1) * (_exchange(model, piece, folded=piece) + _exchange(model, piece))


def _tree(hosts: int, nbytes: int, model: Model) -> float:
    distances = (1 << level for level in range((hosts - 1).bit_length()))
    pairs = ((hosts - 1 - distance) // (2 * distance) + 1 for distance in distances)
    return sum(_level(model, nbytes, 2 * count / hosts) for count in pairs)


def _halving_doubling(hosts: int, nbytes: int, model: Model) -> float:
    levels = hosts.bit_length() - 1
    guests, busy = hosts - (1 << levels), (1 << levels) / hosts
    halves = (nbytes / (1 << level) for level in range(1, levels + 1))
    seconds = _level(model, nbytes, 2 * guests / hosts) if guests else 0.0
    return seconds + sum(
        _exchange(model, half, folded=half, busy=busy) + _exchange(model, half, busy=busy) for half in halves
    )


def _shuffle(hosts: int, nbytes: int, model: Model) -> float:
    piece, others = nbytes / hosts, hosts - 1
    if not others:
        return 0.0
    return others * _exchange(model, piece, folded=piece) + _exchange(model, others * piece, 2 * others)


def _double_tree(hosts: int, nbytes: int, model: Model) -> float:
    """A round moves up to three segments each way once the trees are full, one while they fill and drain.

    The one form here that is an estimate: small trees do better, by up to half, and far more where hosts are crowded.
    """
    if hosts == 1:
        return 0.0
    segments = count_segments(nbytes // ITEMSIZE)
    segment = nbytes / 2 / segments
    filling = 2 * (2 * (hosts.bit_length() - 1) - 1)
    full = 2 * (segments - 1)
    return full * _exchange(model, 3 * segment, 5, segment) + (filling + 2) * _exchange(model, segment, 2, segment)


def _one_shot(hosts: int, nbytes: int, model: Model) -> float:
    others = hosts - 1
    return _exchange(model, others * nbytes, 2 * others, others * nbytes) if others else 0.0


TIMES: dict[str, Callable[[int, int, Model], float]] = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "double_tree": _double_tree,
    "shuffle": _shuffle,
    "one_shot": _one_shot,
}
"""Predicted seconds of an all-reduce: (hosts, bytes, model)."""
