"""The all-reduce algorithms by name: those of `all_reduce_spec`, and those that AUTO chooses from.

A name is a flat algorithm over all participants, or `inner/across` with an inner stage on every host. `xring` is the
ring, `rechd` recursive halving-doubling, `pscpu` and `psgpu` the shuffle onto the hosts' CPUs or onto the participants
themselves, `nccl` the engine's own all-reduce. Names as in the seeds of tf.contrib.distribute.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectived_runtime.plan import double_tree, halving_doubling, hierarchical, one_shot, ring, shuffle, tree
from collectived_runtime.plan.hierarchical import FlatAlgorithm, Hosts, InnerStage
from collectived_runtime.plan.moves import Buffer, FinishMove, Span
from collectived_runtime.plan.wide_moves import NativeKind, NativeMove, WidePlan

FLAT_ALGORITHMS: dict[str, FlatAlgorithm] = {
    "ring": ring.all_reduce,
    "tree": tree.all_reduce,
    "halving_doubling": halving_doubling.all_reduce,
    "shuffle": shuffle.all_reduce,
    "double_tree": double_tree.all_reduce,
    "one_shot": one_shot.all_reduce,
    "xring": ring.all_reduce,
    "rechd": halving_doubling.all_reduce,
    "psgpu": shuffle.all_reduce,
}
ACROSS_ALGORITHMS: dict[str, FlatAlgorithm] = {
    **FLAT_ALGORITHMS,
    "pscpu": shuffle.all_reduce,
    "pscpu/pscpu": shuffle.all_reduce,
}
"""The rest of each algorithm for hosts whose participants have been folded already: its stage across them."""
_TWO_LEVELS: dict[str, tuple[InnerStage, FlatAlgorithm]] = {
    "nccl/xring": (InnerStage.NATIVE, ring.all_reduce),
    "nccl/rechd": (InnerStage.NATIVE, halving_doubling.all_reduce),
    "nccl/pscpu": (InnerStage.NATIVE, shuffle.all_reduce),
    "pscpu/pscpu": (InnerStage.SERVER, shuffle.all_reduce),
}


def all_reduce(name: str, hosts: Hosts, me: int, span: Span, cpus: Sequence[int] = ()) -> WidePlan:
    """The plan of `me` by the algorithm of that name.

    Args:
        name: one of `FLAT_ALGORITHMS` or of `collectived_proto.all_reduce_spec.ALGORITHMS`.
        hosts: the contributing participants, host by host.
        me: one of them, or one of `cpus`.
        span: what is reduced.
        cpus: one participant per host that folds for it where the name says `pscpu`; they need not contribute. Without
            them the first of each host does.
    """
    cpus = cpus or tuple(host[0] for host in hosts)
    members = tuple(member for host in hosts for member in host)
    if name == "nccl":
        return _native_plan(members, span)
    if name == "pscpu":
        return shuffle.all_reduce(members, me, span, cpus)
    if name in _TWO_LEVELS:
        inside, across = _TWO_LEVELS[name]
        return hierarchical.all_reduce(hosts, me, span, across, inside, cpus if inside is InnerStage.SERVER else ())
    return tuple(FLAT_ALGORITHMS[name](members, me, span))


def native_reduce(members: Sequence[int], me: int, span: Span, root: int) -> WidePlan:
    """The engine's own reduce to `root`."""
    finish = (FinishMove(span, Buffer.SCRATCH),) if me == root else ()
    return ((NativeMove(NativeKind.REDUCE, tuple(sorted(members)), span, root),), finish)


def native_broadcast(members: Sequence[int], me: int, span: Span, root: int) -> WidePlan:
    """The engine's own broadcast from `root`."""
    finish = (FinishMove(span, Buffer.INPUT),) if me == root else ()
    return (finish, (NativeMove(NativeKind.BROADCAST, tuple(sorted(members)), span, root),))


def _native_plan(members: Sequence[int], span: Span) -> WidePlan:
    if len(members) == 1:
        return ((FinishMove(span, Buffer.INPUT),),)
    ordered = tuple(sorted(members))
    return ((NativeMove(NativeKind.ALL_REDUCE, ordered, span, ordered[0]),), (FinishMove(span, Buffer.SCRATCH),))
