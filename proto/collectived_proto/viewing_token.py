"""The *viewing token* of a job, for readers of its page and metrics.

It is made from the job's secret, and the secret cannot be found from it: a person who has it, or a link to the page
with it, can see the page, metrics and status, and do nothing else.
"""

from __future__ import annotations

import hashlib
import hmac

_PURPOSE = b"collectived.v1 may look at the page"


def viewing_token(secret: str) -> str:
    """The token for viewing, used instead of the secret: 32 hexadecimal digits; '' where there is no secret."""
    return hmac.new(secret.encode(), _PURPOSE, hashlib.sha256).hexdigest()[:32] if secret else ""
