"""A server of some routes, and what it says to bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from collectived_proto.viewing_token import viewing_token
from collectived_runtime.http.server import HttpServer

PATIENCE = 20.0
SECRET = "s3cret-of-the-job"
TOKEN = viewing_token(SECRET)
ADMITTED = f"Authorization: Bearer {TOKEN}"

Story = Callable[[HttpServer], Awaitable[None]]


def serve(make: Callable[[], HttpServer], story: Story) -> None:
    """Tells a story to a server, which then must have ended whatever it started."""

    async def run() -> None:
        server = make()
        await server.start()
        try:
            async with asyncio.timeout(PATIENCE):
                await story(server)
        finally:
            await server.stop()
        assert not asyncio.all_tasks() - {asyncio.current_task()}

    asyncio.run(run())


def port(server: HttpServer) -> int:
    return int(server.address.rpartition(":")[2])


async def say(server: HttpServer, text: bytes) -> tuple[bytes, bytes]:
    """Sends bytes; the head and the body of what comes until the server closes, both empty where nothing does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port(server))
    try:
        writer.write(text)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    except ConnectionError:
        return b"", b""
    finally:
        writer.close()
    return head, body


async def get(server: HttpServer, target: str, *headers: str, method: str = "GET") -> tuple[bytes, bytes]:
    lines = (f"{method} {target} HTTP/1.1", f"Host: localhost:{port(server)}", *headers, "", "")
    return await say(server, "\r\n".join(lines).encode())


def status(head: bytes) -> int:
    """0 where nothing came."""
    return int(head.split()[1]) if head else 0
