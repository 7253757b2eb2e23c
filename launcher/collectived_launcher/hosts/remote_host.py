"""Another host: an agent there runs our programs, and a *carrier* (ssh, srun, a pipe) brings our words to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from collectived_launcher.hosts import agent_protocol
from collectived_launcher.hosts.host import (
    NOT_RUN,
    HostFacts,
    NetworkInterface,
    ProcessObserver,
    ProgramSpec,
    TaskResult,
)
from collectived_launcher.hosts.loop import Loop
from collectived_launcher.hosts.output import PipeReader
from collectived_launcher.hosts.reaper import Reaper

AGENT_MODULE = "collectived_launcher.hosts.agent"
_STDERR_TAIL_LINES = 8  # lines of a carrier that are kept
_QUOTED = 3  # and of these are shown, where they are the reason
_CLOSED = "the connection was closed"
_PYTHON_HINT = "name an interpreter there that has collectived with --python"
_SSH_HINT = "make 'ssh HOST true' work from here without a question"
_SSH_FAILED = 255  # the exit status of ssh where it is not that of what it ran
_EXIT_GRACE = 1.0  # seconds from the end of a talk to the end of its carrier, which says why


@dataclass(frozen=True, slots=True)
class RemoteCommand:
    """How an agent is started elsewhere: a command whose standard input and output are the agent's.

    transport: its name. target: as in `host.Host`.
    """

    transport: str
    command: tuple[str, ...]
    target: str = ""


@dataclass(frozen=True, slots=True)
class AgentJob:
    """The job, as an agent gets it.

    `folder`: its name for the folder of its sockets; `release`: of the launcher; `silence_timeout`: seconds without a
    message after which a side gives the other up; `open_timeout`: seconds for the agent to answer.
    """

    folder: str
    release: str
    silence_timeout: float = 30.0
    open_timeout: float = 60.0


class RemoteHost:
    """A host behind a carrier.

    Args:
        reaper: of this host, which ends the carrier when the launcher was killed.
        said: what the carrier itself, or the agent by accident, writes once the host serves.
    """

    def __init__(
        self,
        loop: Loop,
        name: str,
        carrier: RemoteCommand,
        job: AgentJob,
        reaper: Reaper,
        said: Callable[[bytes], None],
    ) -> None:
        self.name, self.transport, self.target = name, carrier.transport, carrier.target
        self.facts: HostFacts | None = None
        self.trouble = ""
        self._loop, self._carrier, self._job, self._reaper, self._show_line = loop, carrier, job, reaper, said
        self._open_count = 0
        self._connection: AgentConnection | None = None
        self._on_change: Callable[[], None] = lambda: None
        self._processes: dict[int, RemoteProcess] = {}
        self._pending_tasks: dict[int, Callable[[TaskResult], None]] = {}
        self._last_number = 0
        self._closing = False

    @property
    def closed(self) -> bool:
        return self._connection is None

    def open(self, changed: Callable[[], None]) -> None:
        """
        Raises:
            OSError: the carrier's command cannot be run.
        """
        assert self._connection is None, f"{self.name} is open"
        self.trouble, self._on_change = "", changed
        self._open_count += 1
        folder = self._job.folder if self._open_count == 1 else f"{self._job.folder}-{self._open_count}"
        self._connection = line = AgentConnection(self, self._loop, self._carrier, self._reaper)
        line.channel.send(
            agent_protocol.LauncherHello(agent_protocol.VERSION, self._job.release, folder, self._job.silence_timeout)
        )
        self._loop.call_later(self._job.open_timeout, partial(self._check_opened, line))

    def start(self, program: ProgramSpec, listener: ProcessObserver) -> RemoteProcess:
        self._last_number += 1
        process = RemoteProcess(self, self._last_number, listener)
        if self.facts is None or self._connection is None:
            why = self.trouble or "is not open"
            self._loop.call_later(0.0, partial(process.mark_exited, NOT_RUN, f"its host {self.name} {why}"))
            return process
        self._processes[self._last_number] = process
        attached = program.secret is not None
        secret = (program.secret or "").encode("ascii")
        argv, variables = list(program.argv), dict(program.variables)
        self._connection.channel.send(
            agent_protocol.StartProcess(self._last_number, argv, variables, program.folder, attached, secret)
        )
        return process

    def run_task(self, task: str, about: Mapping[str, Any], answered: Callable[[TaskResult], None]) -> None:
        if self.facts is None or self._connection is None:
            self._loop.call_later(0.0, partial(answered, {"trouble": self.trouble or "it is not open"}))
            return
        self._last_number += 1
        self._pending_tasks[self._last_number] = answered
        self._connection.channel.send(agent_protocol.TaskRequest(self._last_number, task, dict(about)))

    def close(self) -> None:
        self._closing = True
        if self._connection is not None:
            self._connection.channel.write_eof()

    def kill(self) -> None:
        """Waits no longer for the carrier. The agent, if it still lives, ends by itself, because no message comes."""
        if self._connection is not None:
            self._connection.kill()

    def send_keepalive(self) -> None:
        """Send the agent a sign of life. While the loop turns it does so by itself."""
        if self._connection is not None:
            self._connection.channel.send(agent_protocol.KeepAlive())

    # Called by the connection

    def send(self, message: agent_protocol.Message) -> None:
        """A message of process `number`, or an answer."""
        if self._connection is not None:
            self._connection.channel.send(message)

    def on_message(self, message: agent_protocol.Message) -> None:
        match message:
            case agent_protocol.AgentHello():
                self._on_hello(message)
            case agent_protocol.ProcessStarted(number, pid) if number in self._processes:
                self._processes[number].pid = pid
            case agent_protocol.OutputLine(number, stream, body) if number in self._processes:
                self._processes[number].listener.on_output(stream, body)
            case agent_protocol.ProcessEnded(number, status, trouble) if number in self._processes:
                self._processes.pop(number).mark_exited(status, trouble)
            case agent_protocol.TaskReply(number, answer) if number in self._pending_tasks:
                self._pending_tasks.pop(number)(answer)
            case agent_protocol.KeepAlive():
                pass
            case _:
                raise agent_protocol.AgentProtocolError(f"sent an unexpected {type(message).__name__}")

    def on_stderr_line(self, line: bytes) -> None:
        if self.facts is not None and not self._closing:
            self._show_line(line)

    def on_connection_closed(self, why: str) -> None:
        """The carrier has ended."""
        self._connection = None
        how = "lost" if self.facts is not None else "cannot be used"
        self.facts, self.trouble = None, "is closed" if self._closing else f"{how} ({self.transport}): {why}"
        processes, self._processes = self._processes, {}
        asked, self._pending_tasks = self._pending_tasks, {}
        for process in processes.values():
            process.mark_exited(-signal.SIGKILL, f"its host {self.name} is {self.trouble}")
        for answered in asked.values():
            answered({"trouble": self.trouble})
        self._on_change()

    def _on_hello(self, hello: agent_protocol.AgentHello) -> None:
        assert self._connection is not None
        trouble = hello.trouble
        try:
            known = dict(hello.facts)
            known["interfaces"] = tuple(NetworkInterface(**one) for one in known["interfaces"])
            found = HostFacts(**known)
        except (TypeError, KeyError) as error:
            raise agent_protocol.AgentProtocolError(f"sent no facts: {error}") from error
        if not trouble and found.release != self._job.release:
            trouble = (
                f"it has collectived {found.release} ({found.python}), this host has {self._job.release}: install the "
                "same release on both, or name an interpreter that has it with --python"
            )
        if trouble:
            self._connection.give_up(trouble)
            return
        self.facts = found
        self._check_liveness(self._connection)
        self._on_change()

    def _check_opened(self, line: AgentConnection) -> None:
        if line is self._connection and self.facts is None and not self._closing:
            line.give_up(f"no agent answered within {self._job.open_timeout:g} s")

    def _check_liveness(self, line: AgentConnection) -> None:
        if line is not self._connection:
            return
        if time.monotonic() - line.last_received > self._job.silence_timeout:
            line.give_up(f"no message came from it for {self._job.silence_timeout:g} s")
            return
        self.send_keepalive()
        self._loop.call_later(min(1.0, self._job.silence_timeout / 4), partial(self._check_liveness, line))


class RemoteProcess:
    """A process that an agent runs for us."""

    def __init__(self, host: RemoteHost, number: int, listener: ProcessObserver) -> None:
        self.pid = 0
        self.status: int | None = None
        self.trouble = ""
        self.listener = listener
        self._host, self._number = host, number

    def send(self, signum: int) -> None:
        if self.status is None:
            self._host.send(agent_protocol.SignalProcess(self._number, signum))

    def close_stdin(self) -> None:
        if self.status is None:
            self._host.send(agent_protocol.CloseStdin(self._number))

    def mark_exited(self, status: int, trouble: str) -> None:
        """It is over."""
        self.status, self.trouble = status, trouble
        self.listener.on_exit()


class AgentConnection:
    """One running carrier and the talk over it, from its start until it has ended and said all that it says."""

    def __init__(self, host: RemoteHost, loop: Loop, carrier: RemoteCommand, reaper: Reaper) -> None:
        self._host, self._loop, self._reaper = host, loop, reaper
        self._give_up_reason = ""
        self._stderr_tail: deque[str] = deque(maxlen=_STDERR_TAIL_LINES)
        self.last_received = time.monotonic()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            list(carrier.command),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # Ctrl-C is our affair: the carrier has to bring the agent's last words
            preexec_fn=reaper.register_current_process,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        ends = os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno())
        self._process.stdout.close()
        self._process.stdin.close()
        self.channel = agent_protocol.AgentChannel(loop, *ends, self._on_message, self._on_disconnect, greeted=False)
        self._errors = PipeReader(self._process.stderr, self._on_stderr_line)
        loop.register(self._errors.descriptor, self._read_errors)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.register(self._pidfd, self._on_exit)

    def give_up(self, why: str) -> None:
        """Hangs up, for this reason."""
        self._give_up_reason = self._give_up_reason or why
        self.kill()

    def kill(self) -> None:
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _on_message(self, message: agent_protocol.Message) -> None:
        self.last_received = time.monotonic()
        self._host.on_message(message)

    def _on_disconnect(self, why: str) -> None:
        if why:
            self.give_up(f"its agent {why}")
        else:
            self.channel.close()
            self._loop.call_later(_EXIT_GRACE, self._kill_if_running)

    def _kill_if_running(self) -> None:
        """Kill a carrier that does not notice that the other end is gone."""
        if self._process.returncode is None:
            self.kill()

    def _on_stderr_line(self, line: bytes) -> None:
        self._stderr_tail.append(line.decode(errors="replace"))
        self._host.on_stderr_line(line)

    def _read_errors(self) -> None:
        descriptor = self._errors.descriptor
        self._errors.read()
        if not self._errors.is_open:
            self._loop.unregister(descriptor)

    def _on_exit(self) -> None:
        self.channel.read_remaining()
        if self._errors.is_open:
            self._loop.unregister(self._errors.descriptor)
            self._errors.read_remaining()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reaper.unregister_group(self._process.pid)
        status = self._process.wait()
        self._loop.unregister(self._pidfd)
        os.close(self._pidfd)
        self.channel.close()
        self._host.on_connection_closed(self._explain_end(status))

    def _explain_end(self, status: int) -> str:
        noise = self.channel.preamble.decode(errors="replace").strip()
        words = [word for word in [*noise.splitlines()[-1:], *self._stderr_tail] if word.strip()]
        if self._give_up_reason:
            return "; ".join([self._give_up_reason, *words[-1:]])
        why = "; ".join(words[-_QUOTED:]) or (f"it ended with exit status {status}" if status else _CLOSED)
        if status == _SSH_FAILED and self._host.facts is None:  # else the host was there, and is lost
            return f"{why}; {_SSH_HINT}"
        return f"{why}; {_PYTHON_HINT}" if status == NOT_RUN or _lacks_module(why) else why


def _lacks_module(stderr: str) -> bool:
    """Whether an interpreter ended because it has no collectived: its exit status is that of every other failure."""
    return "No module named" in stderr
