"""What came of a drain, in words and as JSON."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.json_format import MessageToJson

from collectived_proto.configuration.quantities import time
from collectived_proto.v1.status_pb2 import Cut, DrainReply
from collectived_proto.wording import be, ranks_text


def lines(reply: DrainReply, timeout: float, stay: bool) -> Iterator[str]:
    """What people are told: who was drained, and what was cut, one line each."""
    end = "refuse everything new" if stay else "end"
    if reply.workers:
        names = ", ".join(map(str, reply.workers))
        one = len(reply.workers) == 1
        yield f"worker{'' if one else 's'} {names} {be(len(reply.workers))} drained, and {_third(end, one)}"
    for group in reply.groups:
        yield f"group {group!r} begins nothing new"
    for cut in reply.cut:
        yield f"cut after {time(timeout)}: {describe(cut)}"
    yield from reply.notes
    if not reply.cut and not reply.uncertain:
        yield "all that ran has finished"


def losses(reply: DrainReply) -> Iterator[str]:
    """What was cut, or may have been, one line each; none where all has finished."""
    for cut in reply.cut:
        yield f"cut: {describe(cut)}"
    if reply.uncertain:
        yield from reply.notes


def describe(cut: Cut) -> str:
    """`all_reduce(sum) #3 of group 'train' at train.py:8 (worker 1); rank 1 did not come to it`"""
    number = f" #{cut.instance}" if cut.instance >= 0 else ""
    site = f" at {cut.site}" if cut.site else ""
    missing = f"; {ranks_text(cut.missing)} did not come to it" if cut.missing else ""
    return f"{cut.op or 'a collective'}{number} of group {cut.group!r}{site} (worker {cut.worker}){missing}"


def document(reply: DrainReply) -> str:
    text: str = MessageToJson(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return text


def _third(verb: str, one: bool) -> str:
    first, _, rest = verb.partition(" ")
    return f"{first}{'s' if one else ''} {rest}".rstrip()
