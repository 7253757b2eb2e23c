"""One process of a job as the launcher knows it: its name, its words, its end, and where it runs."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collectived_launcher.hosts.host import NOT_RUN, Host, HostProcess, ProgramSpec
from collectived_launcher.hosts.log_file import LogFile
from collectived_launcher.hosts.output import Terminal
from collectived_launcher.launch.summary import describe_status
from collectived_proto.report.phrases import sanitize_text

_STDERR_TAIL_LINES = 12  # lines of standard error that are kept for the summary


class Child:
    """A process on a host. `on_exit` is called once, after its last words.

    Args:
        place: the host's name where there are several, for people; else ''.
    """

    def __init__(
        self, name: str, terminal: Terminal, log: LogFile | None, colour: int | None = None, place: str = ""
    ) -> None:
        self.name = name
        self.stderr_tail: deque[str] = deque(maxlen=_STDERR_TAIL_LINES)
        self.exit_callback: Callable[[], None] = lambda: None
        self._terminal, self._host_name = terminal, place
        self._log = log
        self._colour = colour
        self._process: HostProcess | None = None
        self._not_run_reason = ""

    @property
    def pid(self) -> int:
        """0 until it is known."""
        return self._process.pid if self._process else 0

    @property
    def status(self) -> int | None:
        """None while it runs, then as in `Popen.returncode`."""
        if self._not_run_reason:
            return NOT_RUN
        return self._process.status if self._process else None

    @property
    def trouble(self) -> str:
        """Why it could not be run, or that its host is lost; else ''."""
        return self._not_run_reason or (self._process.trouble if self._process else "")

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self.status is None

    def start_program(self, host: Host, program: ProgramSpec) -> None:
        """Starts it there."""
        self._process = host.start(program, self)

    def mark_not_run(self, why: str) -> None:
        """It cannot even be tried."""
        self._not_run_reason = why
        self.on_exit()

    def send(self, signum: int) -> None:
        """To the process and its children."""
        if self._process is not None and self.is_alive:
            self._process.send(signum)

    def on_output(self, stream: int, line: bytes) -> None:
        if stream == 2:
            self.stderr_tail.append(line.decode(errors="replace"))
        self._write_log(line)
        self._terminal.show(stream, self.name, self._format_line(line), self._colour)

    def _write_log(self, line: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(line)
        except OSError as error:  # the process goes on, and what it says is still shown
            self._terminal.say(f"collectived: {self._log.path} is written no more: {error.strerror}")
            self._log.close()
            self._log = None

    def _format_line(self, line: bytes) -> bytes:
        """As it goes to our terminal."""
        return line

    def on_exit(self) -> None:
        if self._log:
            self._log.close()
        self.exit_callback()

    def describe(self) -> str:
        """Its name, host and pid: `rank 3 on b (pid 12)`."""
        pid = f" (pid {self.pid})" if self.pid else ""
        return f"{self.name} on {self._host_name}{pid}" if self._host_name else f"{self.name}{pid}"

    def describe_end(self) -> str:
        """How it ended, in words."""
        return self.trouble or describe_status(self.status or 0)


class Client(Child):
    """The user's program as one rank."""

    def __init__(self, rank: int, terminal: Terminal, log: LogFile | None, place: str = "") -> None:
        super().__init__(f"rank {rank}", terminal, log, colour=rank, place=place)
        self.rank = rank

    def start(self, host: Host, program: Sequence[str], variables: Mapping[str, str], folder: str = "") -> None:
        self.start_program(host, ProgramSpec(tuple(program), variables, folder))


class Daemon(Child):
    """A coordinator or a worker. Standard input is its lifeline: it carries the secret, and its end means "end"."""

    def __init__(self, name: str, terminal: Terminal, log: LogFile | None, place: str = "") -> None:
        super().__init__(name, terminal, log, place=place)
        self.ready_info: dict[str, Any] | None = None
        self.drain_reply_json = ""
        """The result of its drain, a DrainReply as JSON; '' before it has come."""
        self.ready_callback: Callable[[], None] = lambda: None

    @property
    def address(self) -> str:
        """Where it serves."""
        assert self.ready_info is not None
        return str(self.ready_info["address"])

    @property
    def metrics_line(self) -> str:
        """Where its metrics are, for people; "" where they are not served."""
        where = self.ready_info.get("metrics", "") if self.ready_info else ""
        who = f"{self.name} on {self._host_name}" if self._host_name else self.name
        scheme = "https" if self.ready_info and self.ready_info.get("tls") else "http"
        return f"metrics of {who}: {scheme}://{where}/metrics" if where else ""

    def start(self, host: Host, command: Sequence[str], secret: str, variables: Mapping[str, str]) -> None:
        self.start_program(host, ProgramSpec(tuple(command), variables, secret=secret))

    def _format_line(self, line: bytes) -> bytes:
        """Sanitize a line: daemons write names that others chose. Ranks may colour their output."""
        return sanitize_text(line.decode(errors="replace")).encode()

    def close_stdin(self) -> None:
        if self._process is not None and self.is_alive:
            self._process.close_stdin()

    def on_output(self, stream: int, line: bytes) -> None:
        if stream == 1 and self.ready_info is None and line.startswith(b"ready "):
            self.ready_info = json.loads(line.removeprefix(b"ready "))
            self.ready_callback()
        elif stream == 1 and line.startswith(b"drained "):
            self.drain_reply_json = line.removeprefix(b"drained ").decode()
        else:
            super().on_output(2, line)
