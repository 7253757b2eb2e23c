"""Descriptions: collectives as clients describe them, checked, and found again by what described them.

`Prepare` gives a client the number and layout of one; `Submit` brings one along each time, so the facts that follow
from it are kept: the places of its bytes, and the description of its results.
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
from collectived_proto.report.phrases import find_control_character
from collectived_proto.types import AxisOperation, Broadcast, Collective, Layout, Operation, Recv, Send
from collectived_proto.v1 import common_pb2, worker_pb2
from collectived_runtime.engine.clients.local_rank import LocalRank
from collectived_runtime.engine.compile.negotiation import prepare
from collectived_runtime.engine.loop.group_loop import GroupLoop
from collectived_runtime.engine.submit.contracts import PreparedCollective

MAX_PREPARED = 4096  # per rank; older ones are forgotten, as clients do at half of this
MAX_LEAVES = 1 << 16  # of one value
MAX_DESCRIPTION_BYTES = 32 << 20  # bytes of all descriptions of a rank, as they came; the oldest are forgotten here too
MAX_GROUP_NAME_CHARS = 256  # characters of the name of a group, and of a job
OFFLOAD_LEAVES = (
    128  # from here on thinking about a value takes more than a millisecond: that is done beside the event loop
)

T = TypeVar("T")
Span = tuple[int, int]  # bytes from the first to before the second


@dataclass(frozen=True, slots=True)
class ResultChunk:
    """A pack of results: its description, and where its leaves lie, from the start of the result."""

    header: worker_pb2.SubmitResult
    result_spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Submittable:
    """A collective of one rank, ready to be submitted.

    Attributes:
        staging_spans: where each leaf lies in a staging slot, in the order of the leaves.
        nbytes: of all leaves.
        has_input: whether this rank's value is read at all: not of a broadcast from elsewhere.
        has_result_header: whether its results come behind an outline, instead of as `result_chunks` says.
        result_chunks: by pack.
    """

    prepared: PreparedCollective
    staging_spans: tuple[Span, ...]
    nbytes: int
    has_input: bool
    has_result_header: bool
    result_chunks: tuple[ResultChunk, ...]

    @property
    def collective(self) -> Collective:
        return self.prepared.collective

    @property
    def layout(self) -> Layout:
        return self.prepared.layout


def is_point_to_point(operation: Operation) -> bool:
    """Return whether it is numbered apart from the group's instances."""
    return isinstance(operation, (Send, Recv))


async def run_or_offload(leaves: int, about: Callable[[], T]) -> T:
    """Return the result of `about`. For a value of many leaves it runs in another thread than the event loop."""
    return about() if leaves < OFFLOAD_LEAVES else await asyncio.to_thread(about)


def prepare_collective(group_loop: GroupLoop, rank: int, message: common_pb2.Collective) -> PreparedCollective:
    """The collective that a client describes.

    Raises:
        CollectiveError: no rank of the group could mean this, or its devices cannot do it.
    """
    check_leaves(message)
    prepared = prepare(collective_from_proto(message), rank, group_loop.topology)
    group_loop.note_hint(prepared.collective)
    return prepared


def check_leaves(message: common_pb2.Collective) -> None:
    """Raise InvalidArgumentError for values of so many leaves that decoding them would hold up all other clients."""
    if len(message.leaves) > MAX_LEAVES:
        raise InvalidArgumentError(
            f"a value of {len(message.leaves)} leaves, and at most {MAX_LEAVES} may be described: join some into "
            "larger arrays"
        )
    if message.ByteSize() > MAX_DESCRIPTION_BYTES:
        raise InvalidArgumentError(
            f"a value that takes {message.ByteSize()} bytes to describe, and there may be "
            f"{MAX_DESCRIPTION_BYTES}: give its "
            "parts shorter names"
        )


def check_length(what: str, text: str, most: int) -> None:
    """Raise InvalidArgumentError for a text that is longer than any honest one."""
    if len(text) > most:
        raise InvalidArgumentError(f"{what} has {len(text)} characters, and there may be {most}: choose a shorter one")


def check_name(what: str, text: str) -> None:
    """Raise InvalidArgumentError for a name that is too long, or could forge lines where it is shown."""
    check_length(what, text, MAX_GROUP_NAME_CHARS)
    if steering := find_control_character(text):
        raise InvalidArgumentError(f"{what} must have no control characters, got {steering!r}")


def register_prepared(local_rank: LocalRank, made: PreparedCollective, nbytes: int) -> int:
    """The number by which the rank's rings name it from now on; `nbytes` is what its description takes."""
    number = secrets.randbits(63)
    while local_rank.prepared and (
        len(local_rank.prepared) >= MAX_PREPARED or local_rank.prepared_bytes + nbytes > MAX_DESCRIPTION_BYTES
    ):
        oldest = next(iter(local_rank.prepared))
        del local_rank.prepared[oldest]
        local_rank.prepared_bytes -= local_rank.prepared_sizes.pop(oldest)
    local_rank.prepared[number], local_rank.prepared_sizes[number] = made, nbytes
    local_rank.prepared_bytes += nbytes
    return number


class PreparedCache:
    """Descriptions of one rank whose client submits over gRPC, by their messages."""

    def __init__(self, group_loop: GroupLoop, local_rank: LocalRank) -> None:
        self._group_loop = group_loop
        self._local_rank = local_rank
        self._cache: dict[bytes, tuple[int, Submittable]] = {}

    async def find(self, message: common_pb2.Collective) -> tuple[int, Submittable]:
        """The number and the description of a collective; the same message finds the same again.

        Raises:
            CollectiveError: as `prepared` does.
        """
        check_leaves(message)
        key = hashlib.blake2b(message.SerializeToString(deterministic=True), digest_size=16).digest()
        known = self._cache.get(key)
        if known is None or known[0] not in self._local_rank.prepared:
            described = await run_or_offload(len(message.leaves), lambda: self._describe(message))
            known = register_prepared(self._local_rank, described.prepared, message.ByteSize()), described
            self._cache.pop(key, None)
            self._cache[key] = known
            while next(iter(self._cache.values()))[0] not in self._local_rank.prepared:  # forgotten there, oldest first
                del self._cache[next(iter(self._cache))]
        return known

    def clear(self) -> None:
        """Forget all: the rank's session has ended."""
        self._cache.clear()

    def _describe(self, message: common_pb2.Collective) -> Submittable:
        return describe(prepare_collective(self._group_loop, self._local_rank.rank, message), self._local_rank.rank)


def describe(made: PreparedCollective, rank: int) -> Submittable:
    """Derive the facts for this rank's submissions from a collective. Pure."""
    collective, layout = made.collective, made.layout
    spans = []
    for leaf, place in zip(collective.leaves, layout.places, strict=True):
        pack = layout.packs[place.pack]
        start = pack.staging_offset + place.offset * pack.dtype.itemsize
        spans.append((start, start + leaf.nbytes))
    operation = collective.operation
    outlined = isinstance(operation, AxisOperation) or collective.open
    return Submittable(
        made,
        tuple(spans),
        sum(leaf.nbytes for leaf in collective.leaves),
        not isinstance(operation, Broadcast) or operation.root == rank,
        outlined,
        () if outlined else _make_result_chunks(collective, layout),
    )


def _make_result_chunks(collective: Collective, layout: Layout) -> tuple[ResultChunk, ...]:
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
            if leaf.count:  # an empty leaf has nothing to move
                spans.append((start, start + leaf.count * size))
        found.append(ResultChunk(header, tuple(spans)))
    return tuple(found)
