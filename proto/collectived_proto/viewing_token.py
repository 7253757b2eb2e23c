"""Where a job can be looked at over HTTP, and its *viewing token*: who may.

The token is made from the job's secret, and the secret cannot be found from it: whoever has it, or a link to the page
with it, can look at the page, metrics and status, and do nothing else.
"""

from __future__ import annotations

import hashlib
import hmac

LOOPBACK = "127.0.0.1"
_PURPOSE = b"collectived.v1 may look at the page"


def viewing_token(secret: str) -> str:
    """What one shows in order to look, instead of the secret: 32 hexadecimal digits; '' where there is no secret."""
    return hmac.new(secret.encode(), _PURPOSE, hashlib.sha256).hexdigest()[:32] if secret else ""


def parse_http_address(text: str) -> tuple[str, int]:
    """`[HOST:]PORT` as host and port; without a host the loopback.

    Raises:
        ValueError: it is no such address.
    """
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535) or (colon and not host.strip("[]")):
        raise ValueError(f"{text!r} is no [HOST:]PORT: expected PORT or HOST:PORT, such as 8080 or 0.0.0.0:8080")
    return host.strip("[]") or LOOPBACK, int(port)
