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

from collectived_launcher.launch import talk
from collectived_launcher.launch.host import NOT_RUN, Answer, Facts, Interface, Listener, Program
from collectived_launcher.launch.keeper import Keeper
from collectived_launcher.launch.loop import Loop
from collectived_launcher.launch.output import Pipe

AGENT = "collectived_launcher.launch.agent"
_LAST_WORDS = 8  # lines of a carrier that are kept
_QUOTED = 3  # and of these are told, where they are why
_CLOSED = "the connection was closed"
_ADVICE = "name an interpreter there that has collectived with --python"
_LAST_MOMENT = 1.0  # seconds from the end of a talk to the end of its carrier, which says why


@dataclass(frozen=True, slots=True)
class Carrier:
    """How an agent is started elsewhere: a command whose standard input and output are the agent's.

    how: its name. target: as in `host.Host`.
    """

    how: str
    command: tuple[str, ...]
    target: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """What an agent is told of the job: `folder`: its name for the folder of its sockets; `release`: of the launcher;
    `silence`: seconds after which who heard nothing gives the other up; `open_within`: seconds for the agent to answer.
    """

    folder: str
    release: str
    silence: float = 30.0
    open_within: float = 60.0


class Elsewhere:
    """A host behind a carrier.

    Args:
        keeper: of this host, which ends the carrier when the launcher was killed.
        said: what the carrier itself, or the agent by accident, writes once the host serves.
    """

    def __init__(
        self, loop: Loop, name: str, carrier: Carrier, job: Job, keeper: Keeper, said: Callable[[bytes], None]
    ) -> None:
        self.name, self.how, self.target = name, carrier.how, carrier.target
        self.facts: Facts | None = None
        self.trouble = ""
        self._loop, self._carrier, self._job, self._keeper, self._said = loop, carrier, job, keeper, said
        self._opened = 0
        self._line: _Line | None = None
        self._changed: Callable[[], None] = lambda: None
        self._processes: dict[int, RemoteProcess] = {}
        self._asked: dict[int, Callable[[Answer], None]] = {}
        self._count = 0
        self._closing = False

    @property
    def gone(self) -> bool:
        return self._line is None

    def open(self, changed: Callable[[], None]) -> None:
        """
        Raises:
            OSError: the carrier's command cannot be run.
        """
        assert self._line is None, f"{self.name} is open"
        self.trouble, self._changed = "", changed
        self._opened += 1
        folder = self._job.folder if self._opened == 1 else f"{self._job.folder}-{self._opened}"
        self._line = line = _Line(self, self._loop, self._carrier, self._keeper)
        line.talk.send(talk.Begin(talk.VERSION, self._job.release, folder, self._job.silence))
        self._loop.later(self._job.open_within, partial(self._check_opened, line))

    def start(self, program: Program, listener: Listener) -> RemoteProcess:
        self._count += 1
        process = RemoteProcess(self, self._count, listener)
        if self.facts is None or self._line is None:
            why = self.trouble or "is not open"
            self._loop.later(0.0, partial(process.end, NOT_RUN, f"its host {self.name} {why}"))
            return process
        self._processes[self._count] = process
        attached = program.secret is not None
        secret = (program.secret or "").encode("ascii")
        argv, variables = list(program.argv), dict(program.variables)
        self._line.talk.send(talk.Start(self._count, argv, variables, program.folder, attached, secret))
        return process

    def ask(self, errand: str, about: Mapping[str, Any], answered: Callable[[Answer], None]) -> None:
        if self.facts is None or self._line is None:
            self._loop.later(0.0, partial(answered, {"trouble": self.trouble or "it is not open"}))
            return
        self._count += 1
        self._asked[self._count] = answered
        self._line.talk.send(talk.Ask(self._count, errand, dict(about)))

    def close(self) -> None:
        self._closing = True
        if self._line is not None:
            self._line.talk.finish()

    def kill(self) -> None:
        """Waits no longer for the carrier. The agent, if it still lives, ends by itself as it hears nothing."""
        if self._line is not None:
            self._line.kill()

    def keep_warm(self) -> None:
        """Tells the agent that we live; the loop does so by itself while it turns."""
        if self._line is not None:
            self._line.talk.send(talk.Alive())

    # What the line tells

    def tell(self, message: talk.Message) -> None:
        """A message of process `number`, or an answer."""
        if self._line is not None:
            self._line.talk.send(message)

    def heard(self, message: talk.Message) -> None:
        match message:
            case talk.Hello():
                self._hello(message)
            case talk.Started(number, pid) if number in self._processes:
                self._processes[number].pid = pid
            case talk.Line(number, stream, body) if number in self._processes:
                self._processes[number].listener.heard(stream, body)
            case talk.Ended(number, status, trouble) if number in self._processes:
                self._processes.pop(number).end(status, trouble)
            case talk.Answered(number, answer) if number in self._asked:
                self._asked.pop(number)(answer)
            case talk.Alive():
                pass
            case _:
                raise talk.TalkError(f"sent a {type(message).__name__} that nobody waits for")

    def carrier_said(self, line: bytes) -> None:
        if self.facts is not None and not self._closing:
            self._said(line)

    def over(self, why: str) -> None:
        """The carrier has ended."""
        self._line = None
        how = "lost" if self.facts is not None else "cannot be used"
        self.facts, self.trouble = None, "is closed" if self._closing else f"{how} ({self.how}): {why}"
        processes, self._processes = self._processes, {}
        asked, self._asked = self._asked, {}
        for process in processes.values():
            process.end(-signal.SIGKILL, f"its host {self.name} is {self.trouble}")
        for answered in asked.values():
            answered({"trouble": self.trouble})
        self._changed()

    def _hello(self, hello: talk.Hello) -> None:
        assert self._line is not None
        trouble = hello.trouble
        try:
            known = dict(hello.facts)
            known["interfaces"] = tuple(Interface(**one) for one in known["interfaces"])
            found = Facts(**known)
        except (TypeError, KeyError) as error:
            raise talk.TalkError(f"told no facts: {error}") from error
        if not trouble and found.release != self._job.release:
            trouble = (
                f"it has collectived {found.release} ({found.python}), this host has {self._job.release}: install the "
                "same release on both, or name an interpreter that has it with --python"
            )
        if trouble:
            self._line.give_up(trouble)
            return
        self.facts = found
        self._watch_out(self._line)
        self._changed()

    def _check_opened(self, line: _Line) -> None:
        if line is self._line and self.facts is None and not self._closing:
            line.give_up(f"no agent answered within {self._job.open_within:g} s")

    def _watch_out(self, line: _Line) -> None:
        if line is not self._line:
            return
        if time.monotonic() - line.last_heard > self._job.silence:
            line.give_up(f"nothing was heard from it for {self._job.silence:g} s")
            return
        self.keep_warm()
        self._loop.later(min(1.0, self._job.silence / 4), partial(self._watch_out, line))


class RemoteProcess:
    """A process that an agent runs for us."""

    def __init__(self, host: Elsewhere, number: int, listener: Listener) -> None:
        self.pid = 0
        self.status: int | None = None
        self.trouble = ""
        self.listener = listener
        self._host, self._number = host, number

    def send(self, signum: int) -> None:
        if self.status is None:
            self._host.tell(talk.Signal(self._number, signum))

    def end_in_order(self) -> None:
        if self.status is None:
            self._host.tell(talk.EndInput(self._number))

    def end(self, status: int, trouble: str) -> None:
        """It is over."""
        self.status, self.trouble = status, trouble
        self.listener.ended()


class _Line:
    """One running carrier and the talk over it, from its start until it has ended and said all that it says."""

    def __init__(self, host: Elsewhere, loop: Loop, carrier: Carrier, keeper: Keeper) -> None:
        self._host, self._loop, self._keeper = host, loop, keeper
        self._why = ""
        self._words: deque[str] = deque(maxlen=_LAST_WORDS)
        self.last_heard = time.monotonic()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            list(carrier.command),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,  # Ctrl-C is our affair: the carrier has to bring the agent's last words
            preexec_fn=keeper.add_this_process,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        ends = os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno())
        self._process.stdout.close()
        self._process.stdin.close()
        self.talk = talk.Talk(loop, *ends, self._heard, self._hung_up, greeted=False)
        self._errors = Pipe(self._process.stderr, self._said)
        loop.watch(self._errors.descriptor, self._read_errors)
        self._life = os.pidfd_open(self._process.pid)
        loop.watch(self._life, self._ended)

    def give_up(self, why: str) -> None:
        """Hangs up, for this reason."""
        self._why = self._why or why
        self.kill()

    def kill(self) -> None:
        self.talk.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _heard(self, message: talk.Message) -> None:
        self.last_heard = time.monotonic()
        self._host.heard(message)

    def _hung_up(self, why: str) -> None:
        if why:
            self.give_up(f"its agent {why}")
        else:
            self.talk.close()
            self._loop.later(_LAST_MOMENT, self._hurry)

    def _hurry(self) -> None:
        """Nobody is at the other end, and the carrier does not notice."""
        if self._process.returncode is None:
            self.kill()

    def _said(self, line: bytes) -> None:
        self._words.append(line.decode(errors="replace"))
        self._host.carrier_said(line)

    def _read_errors(self) -> None:
        descriptor = self._errors.descriptor
        self._errors.read()
        if not self._errors.open:
            self._loop.forget(descriptor)

    def _ended(self) -> None:
        self.talk.drain()
        if self._errors.open:
            self._loop.forget(self._errors.descriptor)
            self._errors.drain()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._keeper.remove(self._process.pid)
        status = self._process.wait()
        self._loop.forget(self._life)
        os.close(self._life)
        self.talk.close()
        self._host.over(self._reason(status))

    def _reason(self, status: int) -> str:
        noise = self.talk.noise.decode(errors="replace").strip()
        words = [word for word in [*noise.splitlines()[-1:], *self._words] if word.strip()]
        if self._why:
            return "; ".join([self._why, *words[-1:]])
        why = "; ".join(words[-_QUOTED:]) or (f"it ended with exit status {status}" if status else _CLOSED)
        return f"{why}; {_ADVICE}" if status == NOT_RUN or "No module named" in why else why
