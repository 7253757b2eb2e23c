"""Announcing: the root's worker says what it is about to send, before it does, to those that take what comes.

A generator like `execute`, along the moves of a plan. An announcement is the one frame whose length the receiver does
not know beforehand, and whose chain it may not know either; everything else of its header must be as expected.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace

from google.protobuf.message import DecodeError

from collectived_proto.errors import InvalidArgumentError
from collectived_runtime.engine.run.schedule import OnUnexpectedFrame, Wait
from collectived_runtime.plan.moves import RecvMove, SendMove
from collectived_runtime.plan.wide_moves import WidePlan
from collectived_runtime.transport import frame as frames
from collectived_runtime.transport.link import Link, LinkProtocolError

MAX_ANNOUNCEMENT_BYTES = 4 << 20  # bytes


def announce(
    plan: WidePlan,
    links: Mapping[int, Link],
    frame: frames.Frame,
    word: bytes | None,
    known: bool,
    heard: Callable[[bytes, bytes], None],
    judge: OnUnexpectedFrame,
) -> Iterator[Wait]:
    """Passes an announcement on.

    Args:
        frame: the header; the sender fills in its chain and length.
        word: the announcement; None where it is still to be received.
        known: whether `frame.chain` is already what it must be.
        heard: called with the word and the chain that came with it.
        judge: see `OnUnexpectedFrame`.

    Raises:
        LinkBroken: a peer is gone, or announces more than any rank can mean.
    """
    for moves in plan:
        for move in moves:
            match move:
                case RecvMove(peer):
                    frame, word = yield from _receive(links[peer], frame, known, judge)
                    try:
                        heard(word, frame.chain)
                    except (DecodeError, InvalidArgumentError) as error:
                        raise LinkProtocolError(
                            f"an announcement that cannot be read: {error}", links[peer].peer
                        ) from None
                case SendMove(peer):
                    assert word is not None, "an announcement is passed on after it has been received"
                    yield from _send(links[peer], [replace(frame, length=len(word)).encode(), word])
                case _:  # there is nothing to finish
                    pass


def _receive(
    link: Link, expected: frames.Frame, known: bool, judge: OnUnexpectedFrame
) -> Generator[Wait, None, tuple[frames.Frame, bytes]]:
    waiting: Wait = [(link, select.POLLIN)]
    while True:
        header = link.read_header()
        if header is None:
            yield waiting
            continue
        got = _match_header(header, expected)
        if got is not None and (not known or got.chain == expected.chain):
            break
        judge(link, expected.encode(), header)
        yield waiting
    if got.length > MAX_ANNOUNCEMENT_BYTES:
        raise LinkProtocolError(f"it announces {got.length} bytes", link.peer)
    link.consume_header()
    word = bytearray(got.length)
    at = 0
    while at < len(word):
        received = link.recv_into(memoryview(word)[at:])
        at += received
        if not received:
            yield waiting
    return got, bytes(word)


def _match_header(header: bytes, expected: frames.Frame) -> frames.Frame | None:
    """The header, where it is the one that is expected but for its length and chain."""
    try:
        got = frames.parse(header)
    except frames.BadFrame:
        return None
    return got if replace(got, length=expected.length, chain=expected.chain) == expected else None


def _send(link: Link, parts: list[bytes]) -> Iterator[Wait]:
    data = memoryview(b"".join(parts))
    link.is_mid_send = True
    while data:
        taken = link.send([data])
        data = data[taken:]
        if not taken:
            yield [(link, select.POLLOUT)]
    link.is_mid_send = False
