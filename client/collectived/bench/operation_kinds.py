"""The collectives as a benchmark sees them: how a size is divided among ranks, and the formula of bus bandwidth.

The definitions are those of nccl-tests, so that figures can be laid beside figures from there. S is the number of bytes
that algorithm bandwidth counts, n the number of ranks:

    operation        S: bytes of                            bus bandwidth / algorithm bandwidth
    all_reduce       each rank's array                      2 (n - 1) / n
    reduce           each rank's array                      1
    broadcast        root's array                           1
    send_recv        what each rank sends to the next one   1
    all_gather       the result                             (n - 1) / n
    gather           root's result                          (n - 1) / n
    scatter          root's array                           (n - 1) / n
    reduce_scatter   each rank's array                      (n - 1) / n
    all_to_all       each rank's array                      (n - 1) / n

The document on performance in nccl-tests says nothing of gather and scatter: their factor is that of its programs, as
one of the n pieces stays where it is. A barrier moves nothing: it has times and no bandwidths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from collectived_proto.report.bandwidth import BUS_FACTORS, BusFactor


@dataclass(frozen=True, slots=True)
class BenchOperation:
    """One operation.

    Attributes:
        divided: whether S bytes are n pieces, of which `count` is the number of elements of one.
        pieces_in, pieces_out: whether an input, or a result, has all n of them; both False: one. Only where divided.
        reduces, has_root: whether it has a reduce op, a root.
    """

    factor: BusFactor
    divided: bool = False
    pieces_in: bool = False
    pieces_out: bool = False
    reduces: bool = False
    has_root: bool = False
    moves_data: bool = True


KINDS: Mapping[str, BenchOperation] = MappingProxyType(
    {
        "all_reduce": BenchOperation(BUS_FACTORS["all_reduce"], reduces=True),
        "reduce": BenchOperation(BUS_FACTORS["reduce"], reduces=True, has_root=True),
        "broadcast": BenchOperation(BUS_FACTORS["broadcast"], has_root=True),
        "all_gather": BenchOperation(BUS_FACTORS["all_gather"], divided=True, pieces_out=True),
        "gather": BenchOperation(BUS_FACTORS["gather"], divided=True, pieces_out=True, has_root=True),
        "scatter": BenchOperation(BUS_FACTORS["scatter"], divided=True, pieces_in=True, has_root=True),
        "reduce_scatter": BenchOperation(BUS_FACTORS["reduce_scatter"], divided=True, pieces_in=True, reduces=True),
        "all_to_all": BenchOperation(BUS_FACTORS["all_to_all"], divided=True, pieces_in=True, pieces_out=True),
        "send_recv": BenchOperation(BusFactor.ONCE),
        "barrier": BenchOperation(BUS_FACTORS["barrier"], moves_data=False),
    }
)


@dataclass(frozen=True, slots=True)
class Extent:
    """How large one measurement is: `size` is S, `count` elements of the array, or of one piece where S is divided.

    `input_count`, `output_count`: elements of a rank's input, and of a result.
    """

    size: int
    count: int
    input_count: int
    output_count: int


def compute_extent(kind: BenchOperation, nbytes: int, itemsize: int, ranks: int) -> Extent:
    """The largest measurement of at most `nbytes`, but at least one element (of each piece)."""
    if not kind.moves_data:
        return Extent(0, 0, 0, 0)
    pieces = ranks if kind.divided else 1
    count = max(1, nbytes // (itemsize * pieces))
    taken, given = (count * (ranks if whole else 1) for whole in (kind.pieces_in, kind.pieces_out))
    return Extent(count * pieces * itemsize, count, taken, given)


def compute_sizes(min_bytes: int, max_bytes: int, factor: int, step_bytes: int = 0) -> list[int]:
    """From `min_bytes` up to `max_bytes`, each `factor` times the one before, or `step_bytes` more where that is given.

    Raises:
        ValueError: they would not grow.
    """
    if step_bytes <= 0 and (factor < 2 or min_bytes < 1):
        raise ValueError(f"sizes from {min_bytes} by the factor {factor} do not grow: expected 1 or more and 2 or more")
    found = []
    nbytes = min_bytes
    while nbytes <= max_bytes:
        found.append(nbytes)
        nbytes = nbytes + step_bytes if step_bytes > 0 else nbytes * factor
    return found


def compute_extents(kind: BenchOperation, wished: list[int], itemsize: int, ranks: int) -> list[Extent]:
    """The extents to measure for these sizes, each once. Small sizes may round to the same number of elements."""
    return list(dict.fromkeys(compute_extent(kind, nbytes, itemsize, ranks) for nbytes in wished))
