"""The status as the documents of the page, made at most once a second however many look.

Every making asks every worker. Where it takes long, it is done less often.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToJson

from collectived_proto.hurts import code_name, findings
from collectived_proto.shown import (
    finished,
    has_counts,
    has_told,
    is_late,
    is_late_post,
    rank_count,
    size_text,
    worker_state,
)
from collectived_proto.v1.status_pb2 import StatusReply

FRESH_SECONDS = 0.9  # a page that looks every second sees a new picture each time
_SHARE = 10  # making pictures may take one part in so many of the time: of thousands of workers it takes 0.4 s


@dataclass(frozen=True, slots=True)
class Document:
    """JSON, as it is and compressed."""

    plain: bytes
    gzipped: bytes


class Picture:
    """
    ask: gives the status.
    """

    def __init__(self, ask: Callable[[], Awaitable[StatusReply]]) -> None:
        self._ask = ask
        self._making: asyncio.Task[dict[str, Document]] | None = None
        self._fresh_until = 0.0

    async def documents(self) -> dict[str, Document]:
        """By their paths: the last ones while they are fresh, or those that are being made, or new ones."""
        making = self._making
        if making is None or (making.done() and (making.exception() or time.monotonic() > self._fresh_until)):
            making = self._making = asyncio.create_task(self._make())
        return await asyncio.shield(making)  # one who goes away takes it from nobody else

    async def close(self) -> None:
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)

    async def _make(self) -> dict[str, Document]:
        reply = await self._ask()
        begun = time.monotonic()
        made = await asyncio.to_thread(documents, reply)  # so that it does not hold up the coordinator
        ended = time.monotonic()
        self._fresh_until = ended + max(FRESH_SECONDS, _SHARE * (ended - begun))
        return made


def documents(reply: StatusReply) -> dict[str, Document]:
    """What is served of one status."""
    status = MessageToJson(
        reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
    )
    page = f'{{"hurts": {json.dumps(hurts(reply))}, "told": {json.dumps(told(reply))}, "status": {status}}}'
    texts = {"/status.json": status.encode(), "/page.json": page.encode()}
    return {path: Document(text, gzip.compress(text, 1)) for path, text in texts.items()}


def hurts(reply: StatusReply) -> list[dict[str, str]]:
    """The findings, in their order: a word, `note`, `warning` or `error`, and a sentence."""
    return [
        {"word": finding.kind.value, "severity": finding.severity.name.lower(), "sentence": finding.sentence}
        for finding in findings(reply)
    ]


def told(reply: StatusReply) -> dict[str, Any]:
    """What the page does not judge by itself; lists are in the order of those in `status`."""
    return {
        "ranks": rank_count(reply),
        "workers": [worker_state(worker).value for worker in reply.workers],
        "accounts": [has_told(worker) for worker in reply.workers],
        "groups": [
            {
                "counted": has_counts(reply, group),
                "size": size_text(group),
                "late": [is_late(group, flight) for flight in group.in_flight],
                "late_posts": [is_late_post(group, post) for post in group.posts],
                "finished": [finished(member) for member in group.members],
            }
            for group in reply.groups
        ],
        "failures": [code_name(failure.verdict.code) for failure in reply.failures],
    }
