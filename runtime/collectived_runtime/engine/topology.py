"""A generation of a group as one worker sees it: which workers it has, on which devices its ranks are."""

from __future__ import annotations

from dataclasses import dataclass

from collectived_proto.devices import DeviceName
from collectived_proto.types import GroupInfo, Peer, Tier


@dataclass(frozen=True, slots=True)
class Topology:
    """A generation as one worker sees it. `peers` are its workers in order of their lowest rank; `place` is mine.

    `table` is what AUTO chooses: made by the coordinator, the same for all. In an `idle` group waiting is normal.
    """

    group: GroupInfo
    peers: tuple[Peer, ...]
    place: int
    table: tuple[Tier, ...]
    idle: bool = False

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
        return any("GPU" in member.device for member in self.group.members)

    @property
    def why_no_nccl(self) -> str:
        """Why NCCL can carry nothing out in this group, not even inside of its workers, or ''."""
        for member in self.group.members:
            if DeviceName.parse(member.device).kind != "GPU":
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
    def gpus(self) -> tuple[tuple[int, int], ...]:
        """(place, index) of each GPU that ranks are on, in order."""
        named = ((self.place_of(one.rank), DeviceName.parse(one.device)) for one in self.group.members)
        return tuple(sorted({(place, name.index) for place, name in named if name.kind == "GPU"}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this worker."""
        return self.peers[self.place].ranks

    def place_of(self, rank: int) -> int:
        return next(place for place, peer in enumerate(self.peers) if rank in peer.ranks)
