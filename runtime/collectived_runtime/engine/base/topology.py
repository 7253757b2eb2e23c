"""A generation of a group as one worker sees it: which workers it has, on which devices its ranks are."""

from __future__ import annotations

from dataclasses import dataclass, field

from collectived_proto.devices import DeviceName
from collectived_proto.types import GroupInfo, Peer, Tier

MOST_LENDING_WORKERS = 32
"""In larger groups a rank sends little at a time, and new connections for all of them would take a while."""


@dataclass(frozen=True, slots=True)
class GroupTopology:
    """A generation as one worker sees it. `peers`: its workers by their lowest rank; `place`: of this worker.

    `tuning_table` has the choices of AUTO: made by the coordinator, the same for all. In an `idle` group waiting is
    normal. Properties of the members are computed once: collectives ask for them, and there may be thousands of ranks.

    Attributes:
        gpu_indices: by rank, the index of its GPU; -1: it is on none.
        gpus: (place, index) of each GPU that ranks are on, in order: their numbers in a communicator of all.
    """

    group: GroupInfo
    peers: tuple[Peer, ...]
    place: int
    tuning_table: tuple[Tier, ...]
    idle: bool = False
    gpu_indices: tuple[int, ...] = field(init=False, compare=False, repr=False)
    gpus: tuple[tuple[int, int], ...] = field(init=False, compare=False, repr=False)
    _place_by_rank: dict[int, int] = field(init=False, compare=False, repr=False)
    _gpu_numbers: dict[tuple[int, int], int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        places = {rank: place for place, peer in enumerate(self.peers) for rank in peer.ranks}
        homes = tuple(_parse_gpu_index(member.device) for member in self.group.members)
        gpus = tuple(sorted({(places[rank], gpu) for rank, gpu in enumerate(homes) if gpu >= 0}))
        found = {"_place_by_rank": places, "gpu_indices": homes, "gpus": gpus}
        found["_gpu_numbers"] = {gpu: number for number, gpu in enumerate(gpus)}
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_peers(
        cls, group: GroupInfo, peers: tuple[Peer, ...], task: int, table: tuple[Tier, ...], idle: bool = False
    ) -> GroupTopology:
        ordered = tuple(sorted(peers, key=lambda peer: peer.ranks[0]))
        place = next(i for i, peer in enumerate(ordered) if peer.task == task)
        return cls(group, ordered, place, table, idle)

    @property
    def automatic_pack_bytes(self) -> int:
        """The pack size where a call leaves it open; 0: one pack per type."""
        return self.tuning_table[0].bytes_per_pack

    @property
    def may_lend_links(self) -> bool:
        """Whether workers may lend links to ranks, so that no link without TLS may serve another generation.

        All workers must come to the same answer: only the lender of a link knows that it has lent it.
        """
        return 1 < len(self.peers) <= MOST_LENDING_WORKERS and all(len(peer.ranks) == 1 for peer in self.peers)

    @property
    def has_gpus(self) -> bool:
        """Whether any rank is on a GPU."""
        return bool(self.gpus)

    @property
    def nccl_unavailable_reason(self) -> str:
        """Why NCCL can carry nothing out in this group, not even inside of its workers, or ''."""
        if -1 in self.gpu_indices:
            member = self.group.members[self.gpu_indices.index(-1)]
            return f"rank {member.rank} is on {member.device}"
        lacking = next((peer.task for peer in self.peers if not peer.nccl), None)
        if lacking is not None:
            return f"worker {lacking} has no NCCL"
        return ""

    @property
    def nccl_mismatch_reason(self) -> str:
        """Why it can carry nothing out between its workers, or ''."""
        versions = sorted({peer.nccl for peer in self.peers})
        if len(versions) > 1:
            return f"its workers have different versions of NCCL: {' and '.join(map(str, versions))}"
        return ""

    @property
    def ranks_by_gpu(self) -> tuple[tuple[int, ...], ...]:
        """The ranks on each of `gpus`."""
        found: list[list[int]] = [[] for _ in self.gpus]
        for rank, gpu in enumerate(self.gpu_indices):
            if gpu >= 0:
                found[self.gpu_number_of(rank)].append(rank)
        return tuple(map(tuple, found))

    @property
    def own_ranks(self) -> tuple[int, ...]:
        """The ranks of this worker."""
        return self.peers[self.place].ranks

    def place_of(self, rank: int) -> int:
        return self._place_by_rank[rank]

    def gpu_number_of(self, rank: int) -> int:
        """The place in `gpus` of a rank's GPU."""
        return self._gpu_numbers[self._place_by_rank[rank], self.gpu_indices[rank]]


def _parse_gpu_index(device: str) -> int:
    if "GPU" not in device:
        return -1
    name = DeviceName.parse(device)
    return name.index if name.kind == "GPU" else -1
