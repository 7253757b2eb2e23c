"""Spans in pieces, and how rounds are joined.

A *piece* is the part of a span that one participant looks after. *First contact* is the first move between two
participants in one direction. Joining keeps rounds aligned: a move and its counterpart stand in the same round of both
plans, so a participant that has nothing to do in a stage gets empty rounds for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

from collectived_runtime.plan.moves import FinishMove, RecvMove, Round, SendMove, Span

M = TypeVar("M")


@lru_cache(maxsize=64)
def pieces(span: Span, parts: int) -> tuple[Span, ...]:
    """`span.split(parts)`, shared by all participants whose plans are derived in this process."""
    return span.split(parts)


def hull(spans: Sequence[Span]) -> Span:
    """Return the smallest span that holds all of neighbouring `spans`."""
    return Span(spans[0].start, spans[-1].stop) if spans else Span(0, 0)


def idle_rounds(rounds: int) -> Iterator[Round]:
    """Return rounds in which the others are busy."""
    return iter(((),) * rounds)


def prepend_finish(finish: FinishMove | None, rounds: Iterable[Round]) -> Iterator[Round]:
    """`rounds` with `finish` in the first of them, or in a round of its own when there is none."""
    opening: Round = () if finish is None else (finish,)
    for moves in rounds:
        yield (*opening, *moves) if opening else moves
        opening = ()
    if opening:
        yield opening


def drop_empty_moves(rounds: Iterable[tuple[M, ...]]) -> Iterator[tuple[M, ...]]:
    """The same rounds without moves of empty spans, except on first contact: that frame carries the contract.

    Both ends drop alike: the k-th send to a peer is the peer's k-th receive, and their spans are equally long. Rounds
    stay where they are, even when nothing is left in them, so that both ends count them alike.
    """
    met: set[tuple[type, int]] = set()
    for moves in rounds:
        kept = []
        for move in moves:
            if isinstance(move, (SendMove, RecvMove)):
                contact = (type(move), move.peer)
                if not len(move.span) and contact in met:
                    continue
                met.add(contact)
            kept.append(move)
        yield tuple(kept)
