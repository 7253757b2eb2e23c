"""What AUTO chooses in a generation: one table, made here from the topology, so that all workers choose alike."""

from __future__ import annotations

from collections.abc import Sequence

from collectived_proto.types import Peer, Tier
from collectived_runtime.plan.choose import Topology, choose
from collectived_runtime.plan.model import Model

AMONG = ("one_shot", "tree", "halving_doubling", "ring", "shuffle")


def table(peers: Sequence[Peer], model: Model | None = None) -> tuple[Tier, ...]:
    """The table of a generation of these workers; `model` is what its links were measured to be, if they were."""
    hosts = tuple(len(peer.ranks) for peer in peers)
    rows = choose(Topology(hosts, model or Model()), AMONG)
    return tuple(Tier(row.algorithm, row.shards, row.limit, row.bytes_per_pack) for row in rows)
