"""The agent: runs programs on its host for a launcher elsewhere, which it talks to over standard input and output.

It lives for as long as its launcher does. The end of its standard input, a silence that lasts too long, or a signal is
the end of everything that it started: daemons see their standard input end, clients get SIGTERM, and those that are
left after two seconds SIGKILL. Even if the agent itself is killed nothing stays (see `local` and `reaper`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from collectived_launcher.hosts import agent_protocol, host
from collectived_launcher.hosts.local import LocalHost, LocalProcess, collect_facts
from collectived_launcher.hosts.loop import Loop
from collectived_launcher.hosts.reaper import KILL_AFTER
from collectived_proto.ipc import job_files

_BEGIN_TIMEOUT = 60.0  # seconds
_MAX_BACKLOG = 1 << 20  # bytes that the launcher has not taken: beyond it, nothing is read of what programs write


class Agent:
    """Serves one launcher."""

    def __init__(self, loop: Loop, readable: int, writable: int) -> None:
        self._loop = loop
        self._channel = agent_protocol.AgentChannel(loop, readable, writable, self._on_message, self._on_disconnect)
        self._local_host: LocalHost | None = None
        self._processes: dict[int, tuple[LocalProcess, bool]] = {}  # by number; whether it is attached
        self._silence_timeout = _BEGIN_TIMEOUT
        self._last_received = time.monotonic()
        self._end_reason = ""

    def serve(self) -> int:
        """Until the launcher is gone; an exit status."""
        self._channel.send_greeting()
        self._check_liveness()
        while not self._end_reason:
            self._loop.run_once()
            if self._local_host is not None:
                self._local_host.set_output_paused(self._channel.backlog > _MAX_BACKLOG)
            while self._loop.signals:
                if (signum := self._loop.signals.popleft()) != signal.SIGINT:  # Ctrl-C is the launcher's affair
                    self._end_reason = f"got signal {signum}"
        self._shut_down()
        return 0

    def _on_message(self, message: agent_protocol.Message) -> None:
        self._last_received = time.monotonic()
        match message:
            case agent_protocol.LauncherHello():
                self._on_launcher_hello(message)
            case agent_protocol.StartProcess():
                self._start_process(message)
            case agent_protocol.SignalProcess(number, signum):
                if number in self._processes:
                    self._processes[number][0].send(signum)
            case agent_protocol.CloseStdin(number):
                if number in self._processes:
                    self._processes[number][0].close_stdin()
            case agent_protocol.TaskRequest(number, task, about):
                self._opened_host.run_task(
                    task, about, lambda answer: self._channel.send(agent_protocol.TaskReply(number, answer))
                )
            case agent_protocol.KeepAlive():
                pass
            case _:
                self._end_reason = f"the launcher sent a {type(message).__name__}"

    @property
    def _opened_host(self) -> LocalHost:
        if self._local_host is None:
            raise agent_protocol.AgentProtocolError("asked before it began")
        return self._local_host

    def _on_launcher_hello(self, begin: agent_protocol.LauncherHello) -> None:
        self._silence_timeout = begin.silence
        folder, trouble = Path(), ""
        if begin.protocol != agent_protocol.VERSION:
            trouble = (
                f"its agent speaks version {agent_protocol.VERSION} of the launcher's protocol, the "
                f"launcher {begin.protocol}"
            )
        else:
            try:
                folder = job_folder(begin.folder)
                # Programs here find the Python of this process: the one that has collectived.
                path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
                self._local_host = LocalHost(self._loop, folder, variables={"PATH": path})
                self._local_host.open(lambda: None)
            except (OSError, ValueError) as error:
                trouble = str(error)
        self._channel.send(agent_protocol.AgentHello(agent_protocol.VERSION, asdict(collect_facts(folder)), trouble))

    def _start_process(self, start: agent_protocol.StartProcess) -> None:
        secret = start.body.decode("ascii") if start.attached else None
        program = host.ProgramSpec(tuple(start.argv), start.variables, start.folder, secret)
        process = self._opened_host.start(program, _Relay(self, start.number))
        self._processes[start.number] = process, start.attached
        if process.pid:
            self._channel.send(agent_protocol.ProcessStarted(start.number, process.pid))

    def send_line(self, number: int, stream: int, line: bytes) -> None:
        """A process wrote a line."""
        self._channel.send(agent_protocol.OutputLine(number, stream, line))

    def send_process_ended(self, number: int) -> None:
        """A process is over."""
        process, _ = self._processes.pop(number)
        self._channel.send(agent_protocol.ProcessEnded(number, process.status or 0, process.trouble))

    def _on_disconnect(self, why: str) -> None:
        self._end_reason = why or "the launcher is gone"

    def _check_liveness(self) -> None:
        """Send a sign of life, and check that the launcher has sent one."""
        if time.monotonic() - self._last_received > self._silence_timeout:
            self._end_reason = f"no message from the launcher for {self._silence_timeout:g} s"
        if self._local_host is not None:
            self._channel.send(agent_protocol.KeepAlive())
        self._loop.call_later(min(1.0, self._silence_timeout / 4), self._check_liveness)

    def _shut_down(self) -> None:
        for process, attached in list(self._processes.values()):
            if attached:
                process.close_stdin()
            else:
                process.send(signal.SIGTERM)
        self._run_until(lambda: not self._processes)
        if self._local_host is not None:
            self._local_host.close()
        self._channel.write_eof()
        self._run_until(lambda: not self._channel.is_open)

    def _run_until(self, over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + KILL_AFTER
        while not over() and time.monotonic() < deadline:
            self._loop.run_once(deadline - time.monotonic())


class _Relay:
    """Sends the launcher the output and the end of one process."""

    def __init__(self, agent: Agent, number: int) -> None:
        self._agent, self._number = agent, number

    def on_output(self, stream: int, line: bytes) -> None:
        self._agent.send_line(self._number, stream, line)

    def on_exit(self) -> None:
        self._agent.send_process_ended(self._number)


def job_folder(name: str) -> Path:
    """Where the sockets of a job lie on this host.

    Raises:
        OSError, ValueError: they cannot lie there.
    """
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no name of a folder")
    folder = job_files.ensure_runtime_folder() / name
    job_files.check_socket_path(folder / "worker-9999.sock")
    return folder


def main() -> int:
    readable, writable = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # text that is printed by accident must not get into a frame
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return _serve(readable, writable)


def serve_socket(connection: int) -> int:
    """Serve the launcher at the other end of a socket, which is taken over. Return an exit status."""
    return _serve(os.dup(connection), connection)


def _serve(readable: int, writable: int) -> int:
    with Loop() as loop:
        return Agent(loop, readable, writable).serve()


if __name__ == "__main__":
    sys.exit(main())
