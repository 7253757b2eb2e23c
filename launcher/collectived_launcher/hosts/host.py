"""The seam behind which processes are started: a *host* starts programs, passes on their output, and ends them.

Promises of every implementation (`local`, `remote_host`; shown by tests/launcher/hosts/test_host.py):

- A process leads a group of its own; a signal goes to the whole group, and when its leader ends, so does the rest.
- Every line that it wrote is passed on before its end, which is reported exactly once.
- A program that could not be run, or whose host is lost, ends too: `trouble` says why.
- Nothing outlives the launcher, however that ends: processes with a secret see the end of their standard input, all
  get SIGTERM, and those that are left SIGKILL two seconds later.
- A secret is in no command line, environment or file; it is the first line of the program's standard input.

Nothing here blocks: answers come while the launcher's `loop` turns, and never from within the call that asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

NOT_RUN = 127  # the status of what could not be run, as shells have it


LOCALHOST = "localhost"  # the name of this host in a job


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """A program to run. `variables`: added to the host's environment. `folder`: where; '' for the host's choice.

    With a `secret` its standard input is one line with it, then stays open for as long as the launcher lives: its end
    means "end in order". Without one it is empty, and the kernel kills the program when its starter is no more.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    """One address of a network interface; `prefix` is the length of its network's prefix in bits."""

    name: str
    address: str
    prefix: int


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The description of a host, from itself.

    python: the interpreter that has collectived there. release: of collectived. folder: for the job's sockets, made
    and removed by the host, 0700. reached_at: its address as the carrier saw it; '' where that is not known.
    """

    hostname: str
    python: str
    release: str
    cpus: int
    folder: str
    interfaces: tuple[NetworkInterface, ...] = ()
    reached_at: str = ""


class ProcessObserver(Protocol):
    """Receives the output and the end of one process."""

    def on_output(self, stream: int, line: bytes) -> None:
        """It wrote a line, without its end, to standard output (1) or standard error (2)."""

    def on_exit(self) -> None:
        """Its `status` is known, and no more output will come."""


class HostProcess(Protocol):
    """One process that was started. `pid` is 0 until it is known."""

    pid: int
    status: int | None  # as `Popen.returncode`; None while it runs
    trouble: str  # why it has no status of its own: it could not be run, or its host is lost; else ''

    def send(self, signum: int) -> None:
        """Send a signal to its group, if it still runs. A stopped process is continued, so that it can act on it."""

    def close_stdin(self) -> None:
        """Ends its standard input, for programs with a secret."""


TaskResult = dict[str, Any]


class Host(Protocol):
    """A place where processes run.

    name: what the user calls it. transport: what brings us there, for people; '' for this host. target: under which
    name or address other hosts may find it; '' where only the user's name for it is known.
    """

    name: str
    transport: str
    target: str
    facts: HostFacts | None  # None until it is known, and when the host is lost
    trouble: str  # why nothing can be started there (any more); '' else

    @property
    def closed(self) -> bool:
        """Nothing that was started there is left as far as we can know, and no more will be."""

    def open(self, changed: Callable[[], None]) -> None:
        """Makes it ready; `changed` is called whenever `facts` or `trouble` change. A lost host may be opened again."""

    def start(self, program: ProgramSpec, listener: ProcessObserver) -> HostProcess:
        """Starts a program; `facts` must be known."""

    def run_task(self, task: str, about: Mapping[str, Any], answered: Callable[[TaskResult], None]) -> None:
        """Have one of `host_tasks` done there. The answer has `trouble` in it where it failed."""

    def send_keepalive(self) -> None:
        """Send the host a sign of life, while the loop cannot turn."""

    def kill(self) -> None:
        """`close` takes too long: it is waited for no longer."""

    def close(self) -> None:
        """Ends all that is left there, and removes every trace; it is over when `closed`."""
