"""One process of a job as the launcher knows it: its name, its words, its end, and where it runs."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from collectived_launcher.launch.host import NOT_RUN, Host, Process, Program
from collectived_launcher.launch.output import Terminal
from collectived_launcher.launch.summary import describe
from collectived_proto.wording import clean

_LAST_WORDS = 12  # lines of standard error that are kept for the summary


class Child:
    """A process on a host. `ended` is called once, after its last words.

    Args:
        place: the host's name where there are several, for people; else ''.
    """

    def __init__(
        self, name: str, terminal: Terminal, log: Path | None, colour: int | None = None, place: str = ""
    ) -> None:
        self.name = name
        self.last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self.when_ended: Callable[[], None] = lambda: None
        self._terminal, self._place = terminal, place
        self._log: IO[bytes] | None = log.open("ab") if log else None
        self._colour = colour
        self._process: Process | None = None
        self._refused = ""

    @property
    def pid(self) -> int:
        """0 until it is known."""
        return self._process.pid if self._process else 0

    @property
    def status(self) -> int | None:
        """None while it runs, then as in `Popen.returncode`."""
        if self._refused:
            return NOT_RUN
        return self._process.status if self._process else None

    @property
    def trouble(self) -> str:
        """Why it could not be run, or that its host is lost; else ''."""
        return self._refused or (self._process.trouble if self._process else "")

    @property
    def alive(self) -> bool:
        return self._process is not None and self.status is None

    def run(self, host: Host, program: Program) -> None:
        """Starts it there."""
        self._process = host.start(program, self)

    def refuse(self, why: str) -> None:
        """It cannot even be tried."""
        self._refused = why
        self.ended()

    def send(self, signum: int) -> None:
        """To the process and its children."""
        if self._process is not None and self.alive:
            self._process.send(signum)

    def heard(self, stream: int, line: bytes) -> None:
        if stream == 2:
            self.last_words.append(line.decode(errors="replace"))
        if self._log:
            self._log.write(line + b"\n")
            self._log.flush()
        self._terminal.show(stream, self.name, self._shown(line), self._colour)

    def _shown(self, line: bytes) -> bytes:
        """As it goes to our terminal."""
        return line

    def ended(self) -> None:
        if self._log:
            self._log.close()
        self.when_ended()

    def describe(self) -> str:
        """Who it is: `rank 3 on b (pid 12)`."""
        pid = f" (pid {self.pid})" if self.pid else ""
        return f"{self.name} on {self._place}{pid}" if self._place else f"{self.name}{pid}"

    def describe_end(self) -> str:
        """How it ended, in words."""
        return self.trouble or describe(self.status or 0)


class Client(Child):
    """The user's program as one rank."""

    def __init__(self, rank: int, terminal: Terminal, log: Path | None, place: str = "") -> None:
        super().__init__(f"rank {rank}", terminal, log, colour=rank, place=place)
        self.rank = rank

    def start(self, host: Host, program: Sequence[str], variables: Mapping[str, str], folder: str = "") -> None:
        self.run(host, Program(tuple(program), variables, folder))


class Daemon(Child):
    """A coordinator or a worker. Standard input is its lifeline: it carries the secret, and its end means "end"."""

    def __init__(self, name: str, terminal: Terminal, log: Path | None, place: str = "") -> None:
        super().__init__(name, terminal, log, place=place)
        self.ready: dict[str, Any] | None = None
        self.drained = ""
        """What came of its drain, a DrainReply as JSON; '' where it has not said."""
        self.became_ready: Callable[[], None] = lambda: None

    @property
    def address(self) -> str:
        """Where it serves."""
        assert self.ready is not None
        return str(self.ready["address"])

    @property
    def metrics(self) -> str:
        """Where its metrics are, for people; "" where they are not served."""
        where = self.ready.get("metrics", "") if self.ready else ""
        who = f"{self.name} on {self._place}" if self._place else self.name
        scheme = "https" if self.ready and self.ready.get("tls") else "http"
        return f"metrics of {who}: {scheme}://{where}/metrics" if where else ""

    def start(self, host: Host, command: Sequence[str], secret: str, variables: Mapping[str, str]) -> None:
        self.run(host, Program(tuple(command), variables, secret=secret))

    def _shown(self, line: bytes) -> bytes:
        """Daemons tell what others have named; ranks may colour what they say."""
        return clean(line.decode(errors="replace")).encode()

    def end_in_order(self) -> None:
        if self._process is not None and self.alive:
            self._process.end_in_order()

    def heard(self, stream: int, line: bytes) -> None:
        if stream == 1 and self.ready is None and line.startswith(b"ready "):
            self.ready = json.loads(line.removeprefix(b"ready "))
            self.became_ready()
        elif stream == 1 and line.startswith(b"drained "):
            self.drained = line.removeprefix(b"drained ").decode()
        else:
            super().heard(2, line)
