"""The page to which failures on the coordinator's page lead: what each error means, and what to do next."""

from __future__ import annotations

import inspect
import re
from html import escape

from collectived_proto import errors
from collectived_proto.errors import CollectiveError

WHAT_NEXT: dict[type[CollectiveError], tuple[str, str]] = {
    errors.InvalidArgumentError: ("goes on", "correct the program"),
    errors.DeadlineExceededError: ("is over", "find out what `.missing` is doing; `rejoin`, or end"),
    errors.UnavailableError: ("is over", "`rejoin`; if this rank's own worker is lost, connect again"),
    errors.AbortedError: ("is over", "read the reason; end, or `rejoin`"),
    errors.ResourceExhaustedError: (
        "goes on, unless results have no room",
        "wait for results and release arrays, or give the worker more memory",
    ),
    errors.FailedPreconditionError: ("is not affected", "join or connect again"),
    errors.UnimplementedError: ("is not affected", "choose another way"),
    errors.NotFoundError: ("is not affected", "correct the name"),
    errors.UnauthenticatedError: ("is not affected", "show the job's secret"),
    errors.CancelledError: ("is not affected", "nothing: this program has closed the session"),
    errors.InternalError: ("is over, if `.rejoin`", "report it, and connect again"),
    errors.PermissionDeniedError: (
        "is not affected",
        "ask the operator of the worker (a rule may refuse you), choose another name, or show the secret",
    ),
}
"""By error: what becomes of the group, and what to do next. `make docs` makes docs/guide/errors.md of it."""

_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 760px; margin: 0 auto; padding: 12px 20px; font: 15px/1.5 system-ui, sans-serif; }
section { border-left: 4px solid transparent; padding-left: 12px; overflow-wrap: anywhere; }
section:target { border-color: #c02a2a; }
h2 { font-size: 16px; margin: 20px 0 4px; }
p { margin: 2px 0; }
"""


def render_errors_page() -> bytes:
    """HTML with a section for each error, whose anchor is the name of its class."""
    sections = "\n".join(_render_section(kind, *what) for kind, what in WHAT_NEXT.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>collectived: errors</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<h1>Errors</h1>
<p>All ranks on which a collective fails get the same error. <a href="./">Back to the job</a>.</p>
{sections}
</body>
</html>
""".encode()


def _render_section(kind: type[CollectiveError], group: str, following: str) -> str:
    return (
        f'<section id="{kind.__name__}"><h2>{kind.__name__} ({kind.code.name})</h2>'
        f"<p>{_mark_code(inspect.getdoc(kind) or '')}</p><p>The group {_mark_code(group)}.</p>"
        f"<p><b>What to do</b>: {_mark_code(following)}.</p></section>"
    )


def _mark_code(text: str) -> str:
    return re.sub("`(.*?)`", r"<code>\1</code>", escape(text))
