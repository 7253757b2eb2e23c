"""The algorithms that can be simulated and checked, by name, and their plans.

A name is that of a flat algorithm over all devices (`named.FLAT`), `inside/across` with an inner stage on every host
(`leader/ring`, `lanes/halving_doubling`, …), or one that `all_reduce_spec` takes (`pscpu/pscpu`, …). Plans come as
iterators where the algorithm has them, so that a ring of thousands is never held in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, zip_longest

from collectived_proto.spec import ALGORITHMS
from collectived_runtime.plan import halving_doubling, hierarchical, named, ring, shuffle, tree
from collectived_runtime.plan.collect import WideRound
from collectived_runtime.plan.hierarchical import Flat, Hosts, Inside
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.times import TIMES

COMPARED = tuple(TIMES)
_FOLDED_FIRST = Inside.LEADER.value
_BY_ROUNDS: dict[Flat, Flat] = {
    ring.all_reduce: ring.all_reduce_rounds,
    tree.all_reduce: tree.all_reduce_rounds,
    halving_doubling.all_reduce: halving_doubling.all_reduce_rounds,
    shuffle.all_reduce: shuffle.all_reduce_rounds,
}


def participants(hosts: Sequence[int]) -> tuple[range, ...]:
    """Devices numbered through, host by host."""
    *starts, stop = accumulate(hosts, initial=0)
    return tuple(range(start, end) for start, end in zip(starts, (*starts[1:], stop), strict=True))


def known() -> tuple[str, ...]:
    """Every name, for a message."""
    of_spec = (name for name in ALGORITHMS if name not in named.FLAT)
    return (*named.FLAT, *of_spec, *(f"{inside.value}/ring" for inside in Inside), "…")


def is_known(name: str) -> bool:
    inside, slash, across = name.partition("/")
    if name in named.FLAT or name in ALGORITHMS:
        return True
    return bool(slash) and across in named.FLAT and inside in {stage.value for stage in Inside}


def usual(hosts: Sequence[int]) -> tuple[str, ...]:
    """What is worth comparing on such hosts: every flat algorithm between them, and lanes where there are any."""
    if max(hosts) == 1:
        return COMPARED
    lanes = ("lanes/ring", "lanes/halving_doubling") if min(hosts) == max(hosts) else ()
    return (*(of_auto(name, hosts) for name in COMPARED), *lanes)


def every(hosts: Sequence[int]) -> tuple[str, ...]:
    """The usual ones, then flat ones over all devices, then those of `all_reduce_spec`; each plan under one name."""
    flat = COMPARED if max(hosts) > 1 else ()
    return (*usual(hosts), *flat, *(name for name in ALGORITHMS if name not in named.FLAT))


def of_auto(name: str, hosts: Sequence[int]) -> str:
    """AUTO speaks of what crosses the network; the devices of a host are folded there first."""
    return name if max(hosts) == 1 else f"{_FOLDED_FIRST}/{name}"


def plan(name: str, hosts: Hosts, me: int, span: Span) -> Iterable[WideRound]:
    """The plan of participant `me` of hosts as `participants` numbers them, round by round where that is possible.

    Raises:
        KeyError: there is no such algorithm.
    """
    inside, slash, across = name.partition("/")
    if name in named.FLAT:
        return _by_rounds(name)(range(sum(map(len, hosts))), me, span)
    if name in ALGORITHMS:
        return named.all_reduce(name, hosts, me, span)
    stage = Inside(inside)
    servers = [host[0] for host in hosts] if stage is Inside.SERVER else ()
    return hierarchical.all_reduce_rounds(hosts, me, span, _by_rounds(across), stage, servers)


def side_by_side(name: str, hosts: Hosts, me: int, parts: Sequence[Span]) -> Iterator[WideRound]:
    """One plan per part, each on a channel of its own, all in step: what a host's link sees of M shards."""
    plans = [plan(name, hosts, me, part) for part in parts]
    return (tuple(move for moves in rounds for move in moves) for rounds in zip_longest(*plans, fillvalue=()))


def _by_rounds(name: str) -> Flat:
    flat = named.FLAT[name]
    return _BY_ROUNDS.get(flat, flat)
