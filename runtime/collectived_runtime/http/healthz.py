"""`/healthz`: whether a daemon can do its work now."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from collectived_runtime.http.messages import Request, Response, Route, Routes, text_response


def healthz_routes(well: Callable[[], bool]) -> Routes:
    """`/healthz`: whether this daemon can do its work now, and nothing else; so it is open."""

    def respond(request: Request) -> Response:
        return (
            text_response(HTTPStatus.OK, "SERVING")
            if well()
            else text_response(HTTPStatus.SERVICE_UNAVAILABLE, "NOT_SERVING")
        )

    return {"/healthz": Route(respond, is_public=True, ignores_query=True)}
