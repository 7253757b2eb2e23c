"""Collectives as ranks describe them, and whether two of them may be the same instance. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from collectived_proto.device_results import DeviceRows
from collectived_proto.types import Broadcast, Collective, Gather, Layout, Operation, Reduce, Scatter


@dataclass(frozen=True, slots=True)
class PreparedCollective:
    """A collective that a rank has described: what its submissions refer to.

    Facts that can be known beforehand are not computed again at every submission.
    """

    collective: Collective
    contract: bytes
    layout: Layout
    op: str  # the operation as people read it
    terms: bytes = b""  # digest of what an open collective has to agree on too, where the operation may be open
    flaw: str = ""  # why it fails on all ranks, whatever the others submit
    device_rows: DeviceRows | None = None  # where its rank has a result of rows on its GPU
    leaf_bytes: tuple[int, ...] = field(init=False, compare=False)
    staging_slices: tuple[slice, ...] = field(init=False, compare=False)  # of each pack, its bytes in a staging slot
    single_leaf: tuple[int | None, ...] = field(init=False, compare=False)  # of each pack that has but one, its number

    def __post_init__(self) -> None:
        leaves: list[list[int]] = [[] for _ in self.layout.packs]
        for leaf, place in enumerate(self.layout.places):
            leaves[place.pack].append(leaf)
        facts = {
            "leaf_bytes": tuple(leaf.nbytes for leaf in self.collective.leaves),
            "staging_slices": tuple(
                slice(pack.staging_offset, pack.staging_offset + pack.count * pack.dtype.itemsize)
                for pack in self.layout.packs
            ),
            "single_leaf": tuple(members[0] if len(members) == 1 else None for members in leaves),
        }
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    @property
    def device_bytes(self) -> int:
        """Of its rank's result, in memory of its own on a GPU."""
        return self.layout.result_bytes if self.device_rows is None else self.device_rows.nbytes

    def matches(self, other: PreparedCollective) -> bool:
        """Whether both may be the same instance: equal contracts, or equal terms where one takes what comes."""
        if self.contract == other.contract:
            return True
        return (self.collective.open or other.collective.open) and self.terms == other.terms != b""


def receives_from_all(operation: Operation, rank: int) -> bool:
    """Whether a rank that has finished this has had something of every rank, and so all agree."""
    match operation:
        case Broadcast() | Scatter():
            return False
        case Reduce(root=root) | Gather(root=root):
            return rank == root
        case _:
            return True
