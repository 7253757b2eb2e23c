"""What came of several drains that went on side by side, as one."""

from __future__ import annotations

from collections.abc import Iterable

from collectived_proto.v1.status_pb2 import DrainReply


def together(replies: Iterable[DrainReply]) -> DrainReply:
    """A collective of a group with several drained workers is cut once, and told once."""
    whole = DrainReply()
    for reply in replies:
        whole.MergeFrom(reply)
    merged = DrainReply(
        workers=sorted(set(whole.workers)),
        groups=sorted(set(whole.groups)),
        notes=list(dict.fromkeys(whole.notes)),
        uncertain=whole.uncertain,
    )
    seen = set()
    for cut in whole.cut:
        if cut.instance < 0 or (cut.generation, cut.instance) not in seen:
            merged.cut.append(cut)
        seen.add((cut.generation, cut.instance))
    return merged
