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

from collectived_proto.errors import error_class
from collectived_proto.report.findings import code_name, collect_findings
from collectived_proto.report.labels import (
    finished_text,
    has_counts,
    has_reported,
    is_late,
    is_late_p2p,
    rank_count,
    size_text,
    worker_state,
)
from collectived_proto.report.status_json import status_to_json
from collectived_proto.v1.status_pb2 import StatusReply

FRESH_SECONDS = 0.9  # a page that looks every second sees a new picture each time
_RENDER_SHARE = 10  # making pictures may take one part in so many of the time: of thousands of workers it takes 0.4 s


@dataclass(frozen=True, slots=True)
class Document:
    """JSON, as it is and compressed."""

    plain: bytes
    gzipped: bytes


class StatusCache:
    """
    ask: gives the status.
    """

    def __init__(self, ask: Callable[[], Awaitable[StatusReply]]) -> None:
        self._fetch_status = ask
        self._render_task: asyncio.Task[dict[str, Document]] | None = None
        self._fresh_until = 0.0

    async def documents(self) -> dict[str, Document]:
        """By their paths: the last ones while they are fresh, or those that are being made, or new ones."""
        making = self._render_task
        if making is None or (making.done() and (making.exception() or time.monotonic() > self._fresh_until)):
            making = self._render_task = asyncio.create_task(self._render())
        return await asyncio.shield(making)  # a reader that goes away does not cancel it for others

    async def close(self) -> None:
        if self._render_task is not None:
            self._render_task.cancel()
            await asyncio.gather(self._render_task, return_exceptions=True)

    async def _render(self) -> dict[str, Document]:
        reply = await self._fetch_status()
        begun = time.monotonic()
        made = await asyncio.to_thread(render_documents, reply)  # so that it does not hold up the coordinator
        ended = time.monotonic()
        self._fresh_until = ended + max(FRESH_SECONDS, _RENDER_SHARE * (ended - begun))
        return made


def render_documents(reply: StatusReply) -> dict[str, Document]:
    """Render what is served of one status."""
    status = status_to_json(reply, indent=None)
    findings, derived = json.dumps(findings_to_json(reply)), json.dumps(derived_to_json(reply))
    page = f'{{"problems": {findings}, "told": {derived}, "status": {status}}}'
    texts = {"/status.json": status.encode(), "/page.json": page.encode()}
    return {path: Document(text, gzip.compress(text, 1)) for path, text in texts.items()}


def findings_to_json(reply: StatusReply) -> list[dict[str, str]]:
    """The findings, in their order: a word, `note`, `warning` or `error`, and a sentence."""
    return [
        {"word": finding.kind.value, "severity": finding.severity.name.lower(), "sentence": finding.sentence}
        for finding in collect_findings(reply)
    ]


def derived_to_json(reply: StatusReply) -> dict[str, Any]:
    """The judgements that the page does not make itself; lists are in the order of those in `status`."""
    return {
        "ranks": rank_count(reply),
        "workers": [worker_state(worker).value for worker in reply.workers],
        "accounts": [has_reported(worker) for worker in reply.workers],
        "groups": [
            {
                "counted": has_counts(reply, group),
                "size": size_text(group),
                "late": [is_late(group, flight) for flight in group.in_flight],
                "late_posts": [is_late_p2p(group, post) for post in group.posts],
                "finished": [finished_text(member) for member in group.members],
            }
            for group in reply.groups
        ],
        "failures": [code_name(failure.verdict.code) for failure in reply.failures],
        "errors": [error_class(failure.verdict.code).__name__ for failure in reply.failures],
    }
