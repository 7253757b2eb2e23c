"""The message of `launch` when a daemon does not come up: doctor's failures, if there are any."""

from __future__ import annotations

from collections.abc import Callable

import click


def report_failures(say: Callable[[str], None]) -> None:
    """Looks at this host, which takes a second or two, and says what is broken; nothing where all is well."""
    try:
        from collectived_launcher.doctor import collect, report  # not before: a job that starts has no use for them

        failures = collect.find_startup_failures()
    except Exception as error:  # the host is in a bad state, and why the daemon failed was said already
        say(f"collectived: doctor could not look at this host: {error}")
        return
    if failures:
        say("collectived: `collectived doctor` finds on this host:")
    for line in report.format_lines(failures):
        say(click.unstyle(line))
