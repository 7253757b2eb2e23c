"""`/metrics`: the page for scrapers, in the format that they ask for; and the server that has it."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.exposition import choose_encoder

from collectived_runtime.credentials import Gate
from collectived_runtime.http.messages import Answer, Request, Route, Routes, answer, health
from collectived_runtime.http.server import HttpServer, Secure
from collectived_runtime.metrics.page import Source, pieces

PATH = "/metrics"


def route(source: Source) -> Routes:
    """Of what a source tells."""

    def respond(request: Request) -> Answer:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return answer(pieces(source, encode), kind)

    return {PATH: Route(respond, query=True)}


def metrics_server(
    address: str, source: Source, well: Callable[[], bool], gate: Gate, secure: Secure = None
) -> HttpServer:
    """What `--metrics` asks for. `well` is for `/healthz`; the rest is as in `HttpServer`."""
    return HttpServer("--metrics", address, {**route(source), **health(well)}, gate, secure=secure)
