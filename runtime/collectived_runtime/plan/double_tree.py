"""Double binary tree: each half of the span has a tree of its own, and inner members of one are leaves of the other.

A *tree* is binary and in order; a member's *role* is its place in that order. The second tree is the first one with
all roles moved by one, which turns inner members to leaves. Each half is cut into *segments* that follow each other
through the tree, up while they are folded and down again from the root.

Time is counted in ticks of two rounds: left children send in the first, right children in the second, so that no two
arrive at a parent together. Each member sends about twice the span in all, and the first result is there after
2 log2 P ticks. Source: P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan", Parallel Computing 2009.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from collectived_runtime.plan.moves import Buffer, FinishMove, FoldMove, Move, Plan, RecvMove, SendMove, Span
from collectived_runtime.plan.spans import drop_empty_moves, pieces

SEGMENT = 8192
MAX_SEGMENTS = 64


def count_segments(count: int) -> int:
    """Segments of a half for a span of that many elements: more of them fill the tree better, each costs a round."""
    return min(max(1, count // 2 // SEGMENT), MAX_SEGMENTS)


def all_reduce(members: Sequence[int], me: int, span: Span, segments: int = 0) -> Plan:
    """Every member ends with the fold of all contributions, each half made by the root of its tree.

    `segments` per half; 0: as `count_segments` says.
    """
    if len(members) == 1:
        return ((FinishMove(span, Buffer.INPUT),),)
    segments = segments or count_segments(len(span))
    position = members.index(me)
    reach = len(members).bit_length() - 1
    rounds: list[list[Move]] = [[] for _ in range(2 * (segments + 2 * reach - 1))]
    for half, shift in zip(span.split(2), (0, 1), strict=True):
        order = (*members[len(members) - shift :], *members[: len(members) - shift])
        node = _make_node(order, (position + shift) % len(members))
        for number, segment in enumerate(pieces(half, segments)):
            for when, move in _moves(node, segment, reach):
                rounds[when + 2 * number].append(move)
    return tuple(drop_empty_moves(tuple(moves) for moves in rounds))


@dataclass(frozen=True, slots=True)
class _Child:
    member: int
    lowest: int


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One member in one tree; `side`: whether it is its parent's left child (0) or its right one (1)."""

    me: int
    parent: int | None
    side: int
    depth: int
    children: tuple[_Child, ...]


def _make_node(order: Sequence[int], role: int) -> TreeNode:
    begin, end = 0, len(order)
    parent, side, depth = None, 0, 0
    while (root := _root(begin, end)) != role:
        parent, side, depth = order[root], int(role > root), depth + 1
        begin, end = (root + 1, end) if side else (begin, root)
    below = ((begin, root), (root + 1, end))
    children = tuple(_Child(order[_root(*span)], min(order[slice(*span)])) for span in below if span[0] < span[1])
    return TreeNode(order[role], parent, side, depth, children)


def _root(begin: int, end: int) -> int:
    """The root of the roles from `begin` to `end`: everything left of it is a full tree."""
    return begin + (1 << ((end - begin).bit_length() - 1)) - 1


def _moves(node: TreeNode, segment: Span, reach: int) -> Iterator[tuple[int, Move]]:
    """The moves of the first segment, each with its round; each later segment is one tick later."""
    holder, lowest = Buffer.INPUT, node.me
    for side, child in enumerate(node.children):
        fold = FoldMove(holder, received_left=child.lowest < lowest)
        yield 2 * (reach - node.depth - 1) + side, RecvMove(child.member, segment, Buffer.SCRATCH, fold)
        holder, lowest = Buffer.SCRATCH, min(lowest, child.lowest)
    if node.parent is None:
        yield 2 * reach, FinishMove(segment, holder)
    else:
        yield 2 * (reach - node.depth) + node.side, SendMove(node.parent, segment, holder)
        yield 2 * (reach + node.depth - 1) + node.side, RecvMove(node.parent, segment, Buffer.OUTPUT)
    for side, child in enumerate(node.children):
        yield 2 * (reach + node.depth) + side, SendMove(child.member, segment, Buffer.OUTPUT)
