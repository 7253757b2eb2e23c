"""The status as JSON, made at most once a second however many look: every making asks every worker."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from google.protobuf.json_format import MessageToJson

from collectived_proto.v1.status_pb2 import StatusReply

FRESH_SECONDS = 0.9  # a page that looks every second sees a new picture each time


@dataclass(frozen=True, slots=True)
class Document:
    """One picture, as it is and compressed."""

    plain: bytes
    gzipped: bytes


class Picture:
    """
    ask: gives the status.
    """

    def __init__(self, ask: Callable[[], Awaitable[StatusReply]]) -> None:
        self._ask = ask
        self._making: asyncio.Task[Document] | None = None
        self._made = 0.0

    async def document(self) -> Document:
        """The last one while it is fresh, or the one that is being made, or a new one."""
        making = self._making
        if making is None or (making.done() and (making.exception() or time.monotonic() > self._made + FRESH_SECONDS)):
            making = self._making = asyncio.create_task(self._make())
        return await asyncio.shield(making)  # one who goes away takes it from nobody else

    async def close(self) -> None:
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)

    async def _make(self) -> Document:
        reply = await self._ask()
        document = await asyncio.to_thread(_written, reply)  # of thousands of workers: tenths of a second
        self._made = time.monotonic()
        return document


def _written(reply: StatusReply) -> Document:
    text = MessageToJson(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None)
    return Document(text.encode(), gzip.compress(text.encode(), 1))
