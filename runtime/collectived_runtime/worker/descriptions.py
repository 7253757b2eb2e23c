"""Descriptions: collectives as clients describe them, checked, and found again by what described them.

`Prepare` gives a client the number and layout of one; `Submit` brings one along each time, so what follows from it is
kept: where its bytes go, and how its results are told.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from collectived_proto.codec import collective_from_proto
from collectived_proto.errors import InvalidArgumentError
from collectived_proto.types import Broadcast, Collective, Cutting, Layout, Operation, Recv, Send
from collectived_proto.v1 import common_pb2, worker_pb2
from collectived_runtime.engine.lane import Lane
from collectived_runtime.engine.ledger import Prepared
from collectived_runtime.engine.preliminary import prepare
from collectived_runtime.engine.seat import Seat

MAX_PREPARED = 4096  # per rank; older ones are forgotten, as clients do at half of this
MAX_LEAVES = 1 << 16  # of one value
MAX_DESCRIBED = 32 << 20  # bytes of all descriptions of a rank, as they came; the oldest are forgotten here too
LONGEST_GROUP = 256  # characters of the name of a group, and of a job
MANY_LEAVES = (
    128  # from here on thinking about a value takes more than a millisecond: that is done beside the event loop
)

T = TypeVar("T")
Span = tuple[int, int]  # bytes from the first to before the second


@dataclass(frozen=True, slots=True)
class Shipment:
    """A pack of results: what is told of it, and where its leaves lie, from the start of the result."""

    header: worker_pb2.SubmitResult
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """A collective of one rank, ready to be submitted.

    Attributes:
        spans: where each leaf lies in a staging slot, in the order of the leaves.
        nbytes: of all leaves.
        gives: whether this rank's value is read at all: not of a broadcast from elsewhere.
        outlined: whether its results come behind an outline, instead of as `shipments` says.
        shipments: by pack.
    """

    prepared: Prepared
    spans: tuple[Span, ...]
    nbytes: int
    gives: bool
    outlined: bool
    shipments: tuple[Shipment, ...]

    @property
    def collective(self) -> Collective:
        return self.prepared.collective

    @property
    def layout(self) -> Layout:
        return self.prepared.layout


def posted(operation: Operation) -> bool:
    """Whether it is numbered apart from the group's instances."""
    return isinstance(operation, (Send, Recv))


async def think(leaves: int, about: Callable[[], T]) -> T:
    """What `about` returns; a value of many leaves is thought about beside the event loop."""
    return about() if leaves < MANY_LEAVES else await asyncio.to_thread(about)


def prepared(lane: Lane, rank: int, message: common_pb2.Collective) -> Prepared:
    """The collective that a client describes.

    Raises:
        CollectiveError: no rank of the group could mean this, or its devices cannot do it.
    """
    check_leaves(message)
    return prepare(collective_from_proto(message), rank, lane.topology)


def check_leaves(message: common_pb2.Collective) -> None:
    """Raises InvalidArgumentError for values of so many leaves that decoding them would hold up all other clients."""
    if len(message.leaves) > MAX_LEAVES:
        raise InvalidArgumentError(
            f"a value of {len(message.leaves)} leaves, and at most {MAX_LEAVES} may be described: join some into "
            "larger arrays"
        )
    if message.ByteSize() > MAX_DESCRIBED:
        raise InvalidArgumentError(
            f"a value that takes {message.ByteSize()} bytes to describe, and there may be {MAX_DESCRIBED}: give its "
            "parts shorter names"
        )


def check_length(what: str, text: str, most: int) -> None:
    """Raises InvalidArgumentError for a text that is longer than any honest one."""
    if len(text) > most:
        raise InvalidArgumentError(f"{what} has {len(text)} characters, and there may be {most}: choose a shorter one")


def keep(seat: Seat, made: Prepared, nbytes: int) -> int:
    """The number by which the rank's rings name it from now on; `nbytes` is what its description takes."""
    number = secrets.randbits(63)
    while seat.prepared and (len(seat.prepared) >= MAX_PREPARED or seat.described + nbytes > MAX_DESCRIBED):
        oldest = next(iter(seat.prepared))
        del seat.prepared[oldest]
        seat.described -= seat.sizes.pop(oldest)
    seat.prepared[number], seat.sizes[number] = made, nbytes
    seat.described += nbytes
    return number


class Descriptions:
    """Of one rank whose client submits over gRPC."""

    def __init__(self, lane: Lane, seat: Seat) -> None:
        self._lane = lane
        self._seat = seat
        self._known: dict[bytes, tuple[int, Description]] = {}

    async def find(self, message: common_pb2.Collective) -> tuple[int, Description]:
        """The number and the description of a collective; the same message finds the same again.

        Raises:
            CollectiveError: as `prepared` does.
        """
        check_leaves(message)
        key = hashlib.blake2b(message.SerializeToString(deterministic=True), digest_size=16).digest()
        known = self._known.get(key)
        if known is None or known[0] not in self._seat.prepared:
            described = await think(len(message.leaves), lambda: self._describe(message))
            known = keep(self._seat, described.prepared, message.ByteSize()), described
            self._known.pop(key, None)
            self._known[key] = known
            while next(iter(self._known.values()))[0] not in self._seat.prepared:  # forgotten there, oldest first
                del self._known[next(iter(self._known))]
        return known

    def _describe(self, message: common_pb2.Collective) -> Description:
        return describe(prepared(self._lane, self._seat.rank, message), self._seat.rank)


def describe(made: Prepared, rank: int) -> Description:
    """What follows from a collective of this rank for its submissions. Pure."""
    collective, layout = made.collective, made.layout
    spans = []
    for leaf, place in zip(collective.leaves, layout.places, strict=True):
        pack = layout.packs[place.pack]
        start = pack.staging_offset + place.offset * pack.dtype.itemsize
        spans.append((start, start + leaf.nbytes))
    operation = collective.operation
    outlined = isinstance(operation, Cutting) or collective.open
    return Description(
        made,
        tuple(spans),
        sum(leaf.nbytes for leaf in collective.leaves),
        not isinstance(operation, Broadcast) or operation.root == rank,
        outlined,
        () if outlined else _shipments(collective, layout),
    )


def _shipments(collective: Collective, layout: Layout) -> tuple[Shipment, ...]:
    indices: list[list[int]] = [[] for _ in layout.packs]
    for index, place in enumerate(layout.places):
        indices[place.pack].append(index)
    found = []
    for pack, members in zip(layout.packs, indices, strict=True):
        size = pack.result_dtype.itemsize
        header = worker_pb2.SubmitResult(indices=members, total=len(collective.leaves))
        spans = []
        for index in members:
            leaf = collective.leaves[index]
            header.leaves.add(path=leaf.path, dtype=pack.result_dtype.name, shape=leaf.shape)
            start = pack.result_offset + layout.places[index].offset * size
            if leaf.count:  # what is empty has nothing to move
                spans.append((start, start + leaf.count * size))
        found.append(Shipment(header, tuple(spans)))
    return tuple(found)
