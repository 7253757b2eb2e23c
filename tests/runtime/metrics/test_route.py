"""`/metrics`: the formats in which it is told, and that nothing is held up while it is made."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.runtime.http.serving import ADMITTED, SECRET, Story, get, serve, status

from collectived_runtime.auth.credentials import TokenAuthenticator
from collectived_runtime.http.server import HttpServer
from collectived_runtime.metrics.catalogue import WORKER_METRICS
from collectived_runtime.metrics.page import PAUSE, Reading, make_reading, read_auth_rejections
from collectived_runtime.metrics.route import create_metrics_server


class Told:
    """A source with so many groups."""

    def __init__(self, groups: int = 3) -> None:
        self.groups = groups
        self.well = True
        self.gate = TokenAuthenticator(SECRET)

    def read(self) -> Iterator[Reading | None]:
        yield PAUSE
        groups = ((("0", f"g{number}"), 1.0) for number in range(self.groups))
        yield make_reading(WORKER_METRICS["collectived_ranks"], groups)
        yield read_auth_rejections("worker", self.gate.reject_counts)


def served(story: Story, source: Told | None = None) -> None:
    told = source or Told()
    serve(lambda: create_metrics_server("0", told, lambda: told.well, told.gate), story)


def test_metrics_are_told_in_the_format_that_is_asked_for() -> None:
    async def story(server: HttpServer) -> None:
        head, body = await get(server, "/metrics", ADMITTED)
        assert status(head) == 200 and b"\r\ncontent-type: text/plain; version=0.0.4" in head
        assert b'collectived_ranks{group="g2",worker="0"} 1.0' in body
        wished = "accept: application/openmetrics-text;version=1.0.0"
        head, body = await get(server, "/metrics", ADMITTED, wished)
        assert b"\r\ncontent-type: application/openmetrics-text; version=1.0.0" in head and body.endswith(b"# EOF\n")
        head, body = await get(server, "/metrics?name=x", ADMITTED, method="HEAD")
        assert status(head) == 200 and b"\r\ncontent-length: 0\r\n" not in head and body == b""

    served(story)


def test_they_need_a_credential_health_does_not_and_there_is_nothing_else() -> None:
    told = Told()

    async def story(server: HttpServer) -> None:
        assert status((await get(server, "/metrics"))[0]) == 401
        assert status((await get(server, "/metrics", "Authorization: Bearer nonsense"))[0]) == 401
        assert status((await get(server, "/healthz"))[0]) == 200
        told.well = False
        assert status((await get(server, "/healthz"))[0]) == 503
        assert status((await get(server, "/", ADMITTED))[0]) == 404
        _, body = await get(server, "/metrics", ADMITTED)
        for why, count in (("nothing", 1), ("wrong", 1)):
            labels = f'component="worker",protocol="http",reason="{why}"'
            assert f"collectived_refused_total{{{labels}}} {count}.0" in body.decode()
        assert b'reason="viewing"' in body and b'protocol="http",reason="viewing"' not in body

    served(story, told)


def test_others_have_their_turn_while_a_page_is_made() -> None:
    async def story(server: HttpServer) -> None:
        turns = 0
        asking = asyncio.ensure_future(get(server, "/metrics", ADMITTED))
        while not asking.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 100  # a page of 200 pieces

    served(story, Told(10_000))


@pytest.mark.parametrize("shown", [f"Bearer {SECRET}", ADMITTED.partition(": ")[2]])
def test_a_scraper_may_show_the_secret_or_its_token(shown: str) -> None:
    async def story(server: HttpServer) -> None:
        assert status((await get(server, "/metrics", f"Authorization: {shown}"))[0]) == 200

    served(story)
