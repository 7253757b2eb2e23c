"""What ranks of one worker do in their segment where the group has other workers, too: all say the same of it."""

from __future__ import annotations

from collectived_proto.types import AllReduce, Barrier, Collective, Layout, Reduce

_LINE = 64  # bytes to which the values of a pack are rounded up there


def meets_in_segment(collective: Collective, layout: Layout, most: int) -> bool:
    """Whether the ranks fold their values there, and their worker takes the sums to the others and brings the results.

    Larger values go over the doorbell: the worker reads and writes them where all can see them.

    Args:
        most: bytes of a value, and of a result, that a segment takes in one tick.
    """
    if not isinstance(collective.operation, (AllReduce, Reduce, Barrier)):
        return False
    values = sum(_round_up(pack.count * pack.dtype.itemsize) for pack in layout.packs)
    results = sum(_round_up(pack.count * pack.result_dtype.itemsize) for pack in layout.packs)
    return max(values, results) <= most


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE
