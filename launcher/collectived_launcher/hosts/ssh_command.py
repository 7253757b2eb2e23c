"""OpenSSH's client as a carrier. Keys, users, ports and jump hosts are the affair of its config and agent."""

from __future__ import annotations

import contextlib
import math
import shlex
import subprocess
from collections.abc import Sequence

from collectived_launcher.hosts.remote_host import AGENT_MODULE, RemoteCommand

_CONNECT_SECONDS = 15
_QUERY_TIMEOUT = 10.0
_ALIVE_COUNT = 3


def make_remote_command(host: str, python: str, ssh: Sequence[str], silence: float) -> RemoteCommand:
    """How an agent is started on a host.

    Args:
        python: an interpreter there that has collectived.
        ssh: the command, perhaps with options of the user's.
        silence: seconds after which a host that does not answer is given up.
    """
    options = (
        ("BatchMode", "yes"),  # there is no user to answer questions: a key that is not accepted is an error
        ("ConnectTimeout", str(_CONNECT_SECONDS)),
        ("ServerAliveInterval", str(max(1, math.ceil(silence / _ALIVE_COUNT)))),
        ("ServerAliveCountMax", str(_ALIVE_COUNT)),
        ("ControlPath", "none"),  # a shared connection would outlive us
        ("ClearAllForwardings", "yes"),
        ("LogLevel", "ERROR"),  # its output is the reason of a failure, not a banner
    )
    said = [word for option in options for word in ("-o", "=".join(option))]
    there = f"exec {shlex.quote(python)} -P -m {AGENT_MODULE}"
    return RemoteCommand(
        "ssh", (*ssh, "-T", "-x", *said, host.replace("[", "").replace("]", ""), there), resolve_target(host, ssh)
    )


def resolve_target(host: str, ssh: Sequence[str]) -> str:
    """The name or address to which ssh would connect, by its config; '' if it does not say."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [*ssh, "-G", host], capture_output=True, text=True, timeout=_QUERY_TIMEOUT, stdin=subprocess.DEVNULL
        )
        for line in done.stdout.splitlines():
            if line.startswith("hostname "):
                return line.split()[1]
    return ""
