"""The agent: runs programs on its host for a launcher elsewhere, which it talks to over standard input and output.

It lives for as long as its launcher does. The end of its standard input, a silence that lasts too long, or a signal is
the end of everything that it started: daemons see their standard input end, clients get SIGTERM, and who is left after
two seconds SIGKILL. Even if the agent itself is killed nothing stays (see `here` and `keeper`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from collectived_launcher.launch import host, talk
from collectived_launcher.launch.here import Here, LocalProcess, facts
from collectived_launcher.launch.keeper import PATIENCE
from collectived_launcher.launch.loop import Loop
from collectived_proto.local import jobs

_BEGIN_WITHIN = 60.0  # seconds
_MOST_WAITING = 1 << 20  # bytes that the launcher has not taken: beyond it, nothing is read of what programs write


class Agent:
    """Serves one launcher."""

    def __init__(self, loop: Loop, readable: int, writable: int) -> None:
        self._loop = loop
        self._talk = talk.Talk(loop, readable, writable, self._heard, self._hung_up)
        self._here: Here | None = None
        self._processes: dict[int, tuple[LocalProcess, bool]] = {}  # by number; whether it is attached
        self._silence = _BEGIN_WITHIN
        self._last_heard = time.monotonic()
        self._over = ""

    def serve(self) -> int:
        """Until the launcher is gone; an exit status."""
        self._talk.greet()
        self._watch_out()
        while not self._over:
            self._loop.turn()
            if self._here is not None:
                self._here.hush(self._talk.backlog > _MOST_WAITING)
            while self._loop.signals:
                if (signum := self._loop.signals.popleft()) != signal.SIGINT:  # Ctrl-C is the launcher's affair
                    self._over = f"got signal {signum}"
        self._end()
        return 0

    def _heard(self, message: talk.Message) -> None:
        self._last_heard = time.monotonic()
        match message:
            case talk.Begin():
                self._begin(message)
            case talk.Start():
                self._start(message)
            case talk.Signal(number, signum):
                if number in self._processes:
                    self._processes[number][0].send(signum)
            case talk.EndInput(number):
                if number in self._processes:
                    self._processes[number][0].end_in_order()
            case talk.Ask(number, errand, about):
                self._ready.ask(errand, about, lambda answer: self._talk.send(talk.Answered(number, answer)))
            case talk.Alive():
                pass
            case _:
                self._over = f"the launcher sent a {type(message).__name__}"

    @property
    def _ready(self) -> Here:
        if self._here is None:
            raise talk.TalkError("asked before it began")
        return self._here

    def _begin(self, begin: talk.Begin) -> None:
        self._silence = begin.silence
        folder, trouble = Path(), ""
        if begin.protocol != talk.VERSION:
            trouble = (
                f"its agent speaks version {talk.VERSION} of the launcher's protocol, the launcher {begin.protocol}"
            )
        else:
            try:
                folder = job_folder(begin.folder)
                # What runs here finds the Python that we run with: the one that has collectived.
                path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
                self._here = Here(self._loop, folder, variables={"PATH": path})
                self._here.open(lambda: None)
            except (OSError, ValueError) as error:
                trouble = str(error)
        self._talk.send(talk.Hello(talk.VERSION, asdict(facts(folder)), trouble))

    def _start(self, start: talk.Start) -> None:
        secret = start.body.decode("ascii") if start.attached else None
        program = host.Program(tuple(start.argv), start.variables, start.folder, secret)
        process = self._ready.start(program, _Relay(self, start.number))
        self._processes[start.number] = process, start.attached
        if process.pid:
            self._talk.send(talk.Started(start.number, process.pid))

    def say(self, number: int, stream: int, line: bytes) -> None:
        """A process wrote a line."""
        self._talk.send(talk.Line(number, stream, line))

    def ended(self, number: int) -> None:
        """A process is over."""
        process, _ = self._processes.pop(number)
        self._talk.send(talk.Ended(number, process.status or 0, process.trouble))

    def _hung_up(self, why: str) -> None:
        self._over = why or "the launcher is gone"

    def _watch_out(self) -> None:
        """Tells that we live, and looks whether the launcher does."""
        if time.monotonic() - self._last_heard > self._silence:
            self._over = f"heard nothing from the launcher for {self._silence:g} s"
        if self._here is not None:
            self._talk.send(talk.Alive())
        self._loop.later(min(1.0, self._silence / 4), self._watch_out)

    def _end(self) -> None:
        for process, attached in list(self._processes.values()):
            if attached:
                process.end_in_order()
            else:
                process.send(signal.SIGTERM)
        self._turn_until_over(lambda: not self._processes)
        if self._here is not None:
            self._here.close()
        self._talk.finish()
        self._turn_until_over(lambda: not self._talk.open)

    def _turn_until_over(self, over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not over() and time.monotonic() < deadline:
            self._loop.turn(deadline - time.monotonic())


class _Relay:
    """Tells the launcher of one process."""

    def __init__(self, agent: Agent, number: int) -> None:
        self._agent, self._number = agent, number

    def heard(self, stream: int, line: bytes) -> None:
        self._agent.say(self._number, stream, line)

    def ended(self) -> None:
        self._agent.ended(self._number)


def job_folder(name: str) -> Path:
    """Where the sockets of a job lie on this host.

    Raises:
        OSError, ValueError: they cannot lie there.
    """
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no name of a folder")
    folder = jobs.runtime_folder() / name
    jobs.check_socket_path(folder / "worker-9999.sock")
    return folder


def main() -> int:
    readable, writable = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what is printed by accident must not get into a frame
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return _serve(readable, writable)


def over(connection: int) -> int:
    """Serves the launcher at the other end of a socket, which is ours from now on; an exit status."""
    return _serve(os.dup(connection), connection)


def _serve(readable: int, writable: int) -> int:
    with Loop() as loop:
        return Agent(loop, readable, writable).serve()


if __name__ == "__main__":
    sys.exit(main())
