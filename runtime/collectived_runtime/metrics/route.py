"""`/metrics`: the page for scrapers, in the format that they ask for; and the server that has it."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.exposition import choose_encoder

from collectived_runtime.auth.credentials import TokenAuthenticator
from collectived_runtime.http.healthz import healthz_routes
from collectived_runtime.http.messages import Request, Response, Route, Routes, ok_response
from collectived_runtime.http.server import GetTlsContext, HttpServer
from collectived_runtime.metrics.page import MetricsSource, render_chunks

PATH = "/metrics"


def metrics_routes(source: MetricsSource) -> Routes:
    """Return the routes of a source's metrics."""

    def respond(request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return ok_response(render_chunks(source, encode), kind)

    return {PATH: Route(respond, ignores_query=True)}


def create_metrics_server(
    address: str,
    source: MetricsSource,
    well: Callable[[], bool],
    gate: TokenAuthenticator,
    secure: GetTlsContext = None,
) -> HttpServer:
    """Make the server that `--metrics` asks for. `well` is for `/healthz`; the rest is as in `HttpServer`."""
    return HttpServer("--metrics", address, {**metrics_routes(source), **healthz_routes(well)}, gate, secure=secure)
