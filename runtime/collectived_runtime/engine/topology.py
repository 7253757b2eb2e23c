"""A generation of a group as one worker sees it: which workers it has, on which devices its ranks are."""

from __future__ import annotations

from dataclasses import dataclass, field

from collectived_proto.devices import DeviceName
from collectived_proto.types import GroupInfo, Peer, Tier


@dataclass(frozen=True, slots=True)
class Topology:
    """A generation as one worker sees it. `peers` are its workers in order of their lowest rank; `place` is mine.

    `table` is what AUTO chooses: made by the coordinator, the same for all. In an `idle` group waiting is normal.
    What follows from the members is found once: collectives ask for it, and there may be thousands of ranks.

    Attributes:
        homes: by rank, the index of its GPU; -1: it is on none.
        gpus: (place, index) of each GPU that ranks are on, in order: their numbers in a communicator of all.
    """

    group: GroupInfo
    peers: tuple[Peer, ...]
    place: int
    table: tuple[Tier, ...]
    idle: bool = False
    homes: tuple[int, ...] = field(init=False, compare=False, repr=False)
    gpus: tuple[tuple[int, int], ...] = field(init=False, compare=False, repr=False)
    _places: dict[int, int] = field(init=False, compare=False, repr=False)
    _numbers: dict[tuple[int, int], int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        places = {rank: place for place, peer in enumerate(self.peers) for rank in peer.ranks}
        homes = tuple(_gpu(member.device) for member in self.group.members)
        gpus = tuple(sorted({(places[rank], gpu) for rank, gpu in enumerate(homes) if gpu >= 0}))
        found = {"_places": places, "homes": homes, "gpus": gpus}
        found["_numbers"] = {gpu: number for number, gpu in enumerate(gpus)}
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls, group: GroupInfo, peers: tuple[Peer, ...], task: int, table: tuple[Tier, ...], idle: bool = False
    ) -> Topology:
        ordered = tuple(sorted(peers, key=lambda peer: peer.ranks[0]))
        place = next(i for i, peer in enumerate(ordered) if peer.task == task)
        return cls(group, ordered, place, table, idle)

    @property
    def automatic_pack_bytes(self) -> int:
        """The pack size where a call leaves it open; 0: one pack per type."""
        return self.table[0].bytes_per_pack

    @property
    def on_gpus(self) -> bool:
        """Whether any rank is on a GPU."""
        return bool(self.gpus)

    @property
    def why_no_nccl(self) -> str:
        """Why NCCL can carry nothing out in this group, not even inside of its workers, or ''."""
        if -1 in self.homes:
            member = self.group.members[self.homes.index(-1)]
            return f"rank {member.rank} is on {member.device}"
        lacking = next((peer.task for peer in self.peers if not peer.nccl), None)
        if lacking is not None:
            return f"worker {lacking} has no NCCL"
        return ""

    @property
    def how_nccl_differs(self) -> str:
        """Why it can carry nothing out between its workers, or ''."""
        versions = sorted({peer.nccl for peer in self.peers})
        if len(versions) > 1:
            return f"its workers have different versions of NCCL: {' and '.join(map(str, versions))}"
        return ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this worker."""
        return self.peers[self.place].ranks

    def place_of(self, rank: int) -> int:
        return self._places[rank]

    def number_of(self, rank: int) -> int:
        """The place in `gpus` of a rank's GPU."""
        return self._numbers[self._places[rank], self.homes[rank]]


def _gpu(device: str) -> int:
    if "GPU" not in device:
        return -1
    name = DeviceName.parse(device)
    return name.index if name.kind == "GPU" else -1
