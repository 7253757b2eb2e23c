"""Errors as gRPC statuses that any client can take: trailers of more than 8 KiB are refused by most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import grpc

from collectived_proto.codec import verdict_to_proto
from collectived_proto.error_status import to_status
from collectived_proto.errors import CollectiveError, error_class
from collectived_proto.types import GroupInfo, Member, Verdict

MAX_VERDICT_BYTES = 5 << 10  # bytes of a verdict in a status; it travels as base64, beside its message
MAX_MESSAGE_BYTES = 3000  # bytes of a message as a header, without a verdict
MAX_MESSAGE_BYTES_WITH_VERDICT = 300  # with one, which says it all
_MAX_CUT_MESSAGE_BYTES = 2000  # bytes of the message in a verdict that is too large
_MAX_NAMED_MEMBERS = 8


def error_to_status(error: CollectiveError) -> grpc.Status:
    """The status of a failed call: canonical code, message, and the verdict where there is one, cut to what travels."""
    if error.verdict is None:
        return to_status(error_class(error.code)(_truncate_header(str(error), MAX_MESSAGE_BYTES)))
    verdict = next(
        cut for cut in _shorten_verdict(error.verdict) if verdict_to_proto(cut).ByteSize() <= MAX_VERDICT_BYTES
    )
    return to_status(
        error_class(verdict.code)(_truncate_header(verdict.message, MAX_MESSAGE_BYTES_WITH_VERDICT), verdict=verdict)
    )


def complete_verdict(verdict: Verdict, group: GroupInfo) -> Verdict:
    """Fill in the members of a group loop's verdict, which leaves out what clients with a doorbell know."""
    return replace(verdict, missing=group.complete(verdict.missing), differing=group.complete(verdict.differing))


def _shorten_verdict(verdict: Verdict) -> Iterator[Verdict]:
    """Yield shorter and shorter versions: the missing ranks and the differences are dropped last."""
    yield verdict
    yield (verdict := replace(verdict, members=()))
    yield (verdict := replace(verdict, missing=tuple(replace(member, stack="") for member in verdict.missing)))
    yield (
        verdict := replace(verdict, message=verdict.message.encode()[:_MAX_CUT_MESSAGE_BYTES].decode(errors="ignore"))
    )
    short = [
        tuple(Member(member.rank, "", 0, "", 0) for member in members)
        for members in (verdict.missing, verdict.differing)
    ]
    yield (verdict := replace(verdict, missing=short[0], differing=short[1]))
    yield replace(
        verdict,
        group=verdict.group[:100],
        op=verdict.op[:200],
        missing=short[0][:_MAX_NAMED_MEMBERS],
        differing=short[1][:_MAX_NAMED_MEMBERS],
    )


def _truncate_header(text: str, most: int) -> str:
    """As much of a text as makes a header of that many bytes, in which each byte beyond ASCII takes three."""
    used = 0
    for index, letter in enumerate(text):
        used += 1 if " " <= letter <= "~" and letter != "%" else 3 * len(letter.encode())
        if used > most:
            return text[:index]
    return text
