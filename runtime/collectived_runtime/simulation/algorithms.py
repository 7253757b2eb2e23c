"""The algorithms that can be simulated and checked, by name, and their plans.

A name is that of a flat algorithm over all devices (`catalog.FLAT_ALGORITHMS`), `inside/across` with an inner stage on
every host (`leader/ring`, `lanes/halving_doubling`, …), or one that `all_reduce_spec` takes (`pscpu/pscpu`, …). Plans
come as iterators where the algorithm has them, so that a ring of thousands is never held in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, zip_longest

from collectived_proto.all_reduce_spec import ALGORITHMS
from collectived_runtime.plan import catalog, halving_doubling, hierarchical, ring, shuffle, tree
from collectived_runtime.plan.closed_form import TIMES
from collectived_runtime.plan.hierarchical import FlatAlgorithm, Hosts, InnerStage
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.wide_moves import WideRound

TIMED_ALGORITHMS = tuple(TIMES)
_AUTO_INNER_STAGE = InnerStage.LEADER.value
_STREAMING: dict[FlatAlgorithm, FlatAlgorithm] = {
    ring.all_reduce: ring.all_reduce_rounds,
    tree.all_reduce: tree.all_reduce_rounds,
    halving_doubling.all_reduce: halving_doubling.all_reduce_rounds,
    shuffle.all_reduce: shuffle.all_reduce_rounds,
}


def participants(hosts: Sequence[int]) -> tuple[range, ...]:
    """Devices numbered through, host by host."""
    *starts, stop = accumulate(hosts, initial=0)
    return tuple(range(start, end) for start, end in zip(starts, (*starts[1:], stop), strict=True))


def list_names() -> tuple[str, ...]:
    """Return every name, for a message."""
    of_spec = (name for name in ALGORITHMS if name not in catalog.FLAT_ALGORITHMS)
    return (*catalog.FLAT_ALGORITHMS, *of_spec, *(f"{inside.value}/ring" for inside in InnerStage), "…")


def is_known(name: str) -> bool:
    inside, slash, across = name.partition("/")
    if name in catalog.FLAT_ALGORITHMS or name in ALGORITHMS:
        return True
    return bool(slash) and across in catalog.FLAT_ALGORITHMS and inside in {stage.value for stage in InnerStage}


def default_names(hosts: Sequence[int]) -> tuple[str, ...]:
    """The algorithms worth comparing on such hosts: every flat one between them, and lanes where there are any."""
    if max(hosts) == 1:
        return TIMED_ALGORITHMS
    by_lanes = ("lanes/ring", "lanes/halving_doubling") if min(hosts) == max(hosts) else ()
    return (*(qualify_auto_name(name, hosts) for name in TIMED_ALGORITHMS), *by_lanes)


def all_names(hosts: Sequence[int]) -> tuple[str, ...]:
    """The usual ones, then flat ones over all devices, then those of `all_reduce_spec`; each plan under one name."""
    flat = TIMED_ALGORITHMS if max(hosts) > 1 else ()
    return (*default_names(hosts), *flat, *(name for name in ALGORITHMS if name not in catalog.FLAT_ALGORITHMS))


def qualify_auto_name(name: str, hosts: Sequence[int]) -> str:
    """AUTO speaks of what crosses the network; the devices of a host are folded there first."""
    return name if max(hosts) == 1 else f"{_AUTO_INNER_STAGE}/{name}"


def make_plan(name: str, hosts: Hosts, me: int, span: Span) -> Iterable[WideRound]:
    """The plan of participant `me` of hosts as `participants` numbers them, round by round where that is possible.

    Raises:
        KeyError: there is no such algorithm.
    """
    inside, slash, across = name.partition("/")
    if name in catalog.FLAT_ALGORITHMS:
        return _streaming_algorithm(name)(range(sum(map(len, hosts))), me, span)
    if name in ALGORITHMS:
        return catalog.all_reduce(name, hosts, me, span)
    stage = InnerStage(inside)
    servers = [host[0] for host in hosts] if stage is InnerStage.SERVER else ()
    return hierarchical.all_reduce_rounds(hosts, me, span, _streaming_algorithm(across), stage, servers)


def merge_shard_plans(name: str, hosts: Hosts, me: int, parts: Sequence[Span]) -> Iterator[WideRound]:
    """One plan per part, each on a channel of its own, all in step: what a host's link sees of M shards."""
    plans = [make_plan(name, hosts, me, part) for part in parts]
    return (tuple(move for moves in rounds for move in moves) for rounds in zip_longest(*plans, fillvalue=()))


def _streaming_algorithm(name: str) -> FlatAlgorithm:
    flat = catalog.FLAT_ALGORITHMS[name]
    return _STREAMING.get(flat, flat)
