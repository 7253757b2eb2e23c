"""Daemons of tests, each a fork of a process that has imported what a coordinator and a worker need."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import cast

from tests.forked_process import fork_server

from collectived.testing import daemon
from collectived_proto.config.flags import NO_TLS_FLAGS


def is_secured(arguments: Sequence[str]) -> bool:
    """Whether a daemon speaks TLS, so that it has to import gRPC by itself."""
    return any(word.startswith("--tls-cert") and word not in NO_TLS_FLAGS for word in arguments)


class ForkedDaemon(daemon.Daemon):
    """The daemon that its command line says.

    It begins by itself, and imports everything, with `within` (`("env",)` will do), with a COMMAND of its own, and with
    TLS, of which gRPC learns the ciphers while it is imported.

    Attributes:
        MODULE: whose `main()` it runs with its arguments.
        WARM: what is imported before the fork.
    """

    MODULE = "collectived_runtime.__main__"
    WARM: tuple[str, ...] = ("collectived_runtime.worker.server", "collectived_runtime.coordinator.server")

    def __init__(
        self,
        arguments: Sequence[str],
        secret: str,
        within: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = {**os.environ, **(environment or {})}
        super().__init__(arguments, secret, within)

    def _start(self, within: Sequence[str], arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        if within or is_secured(arguments) or self.COMMAND is not daemon.COMMAND:
            return super()._start(within, arguments)
        program = f"from {self.MODULE} import main; main({list(arguments)!r})"
        started = fork_server(self.MODULE, *self.WARM).start(program, self._environment, text=False)
        return cast("subprocess.Popen[bytes]", started)
