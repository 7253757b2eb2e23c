"""Certificates: can they be used, and for how long still?"""

from __future__ import annotations

from collections.abc import Iterator

from collectived_launcher.doctor.facts import Certificate
from collectived_launcher.doctor.finding import Finding, failure, ok, warning

EXPIRES_SOON_DAYS = 30  # days
_RENEW = (
    "`collectived certs renew` where it was made, then put the new tls.crt in its place: daemons read it by themselves"
)


def check_certificates(found: tuple[Certificate, ...]) -> Iterator[Finding]:
    if not found:
        yield ok("certificates", "none is named by the environment or the daemons' file: TCP is plain text here")
    for one in found:
        who = f"{one.path} (named by {one.named_by})"
        if one.trouble:
            yield failure("certificates", one.trouble, f"it is named by {one.named_by}: correct that, or the file")
        elif one.days_left is None:
            yield ok("certificates", f"{who} can be used")
        elif one.days_left < EXPIRES_SOON_DAYS:
            yield warning("certificates", f"{who} expires in {_days_text(one.days_left)}", _RENEW)
        else:
            yield ok("certificates", f"{who} is good for {_days_text(one.days_left)}")


def _days_text(count: int) -> str:
    return "less than a day" if count < 1 else "1 day" if count == 1 else f"{count} days"
