"""Processes that a drill has: daemons and ranks, each held by its standard input, which ends when the drill does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.drills.history import Event, Gone, Outcome, Submit
from tests.drills.limits import Hang, Limit
from tests.forked_process import ForkedProcess, fork_server

from collectived_proto.errors import Code

ROOT = Path(__file__).parents[2]
SECRET = "the-secret-of-the-drills"
_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # `end_with_stacks`; `_PROGRAM` has the same
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_END_SECONDS = 10.0  # within which a process must have ended that was told to


_DAEMON = "collectived_runtime.__main__"
_RANK = "tests.drills.rank"
_WARM = (_DAEMON, "collectived_runtime.worker.server", "collectived_runtime.coordinator.server", _RANK)
_PROGRAM = "import faulthandler, sys; faulthandler.enable(); sys.argv = {!r}; from {} import main; main()"


class Process:
    """A process with its standard error kept, and whatever signals a drill has for it.

    It is a fork of one that has imported its module, but on another host: `within` is what to put before its command.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        within: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        variables = os.environ | _ENVIRONMENT | (environment or {})
        pipe = subprocess.PIPE
        self._popen: subprocess.Popen[str] | ForkedProcess
        if within:
            command = [*within, sys.executable, "-m", module, *arguments]
            self._popen = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdin=pipe, stdout=pipe, stderr=pipe, text=True
            )
        else:
            program = _PROGRAM.format([module, *arguments], module)
            self._popen = fork_server(*_WARM).start(program, variables, folder=ROOT)
        self.pid = self._popen.pid
        self.log: list[str] = []
        self.changed = threading.Condition()
        self.ended = False
        self._stopped = False
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_errors, self._read_output)]
        for reader in self._readers:
            reader.start()

    def heard(self, line: str) -> None:
        """One line of standard output; called with `changed` held."""

    def say(self, line: str) -> None:
        assert self._popen.stdin
        with contextlib.suppress(BrokenPipeError):  # it has died: whoever waits for an answer will see that
            self._popen.stdin.write(line + "\n")
            self._popen.stdin.flush()

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def status(self) -> int | None:
        """As in Popen.returncode."""
        return self._popen.poll()

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait(_END_SECONDS)

    def end_with_stacks(self) -> str:
        """End it by SIGABRT; return what it has written to standard error: at its end the stacks of its threads."""
        self.go_on()
        self._popen.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_END_SECONDS)
        self.kill()
        for reader in self._readers:
            reader.join(_END_SECONDS)
        return "".join(self.log)

    def interrupt(self) -> None:
        """SIGINT."""
        os.kill(self.pid, signal.SIGINT)

    def stop(self) -> None:
        """SIGSTOP; returns when every thread of it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        self._stopped = True
        Limit(_END_SECONDS).until(self._stands_still, f"the standstill of process {self.pid}")

    def _stands_still(self) -> bool:
        stats = [stat.read_text() for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def go_on(self) -> None:
        """SIGCONT."""
        if self._stopped and self.alive:
            os.kill(self.pid, signal.SIGCONT)
        self._stopped = False

    def close(self) -> None:
        """Ends it in order, or, where it does not end, by force: then raises Hang."""
        self.go_on()
        assert self._popen.stdin and self._popen.stdout and self._popen.stderr
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        try:
            self._popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Hang(f"process {self.pid} did not end within {_END_SECONDS:g} s of being told to") from None
        finally:
            for reader in self._readers:
                reader.join(_END_SECONDS)
            self._popen.stdout.close()
            self._popen.stderr.close()

    def _read_errors(self) -> None:
        assert self._popen.stderr
        self.log.extend(self._popen.stderr)

    def _read_output(self) -> None:
        assert self._popen.stdout
        for line in self._popen.stdout:
            with self.changed:
                self.heard(line)
                self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()


class Daemon(Process):
    """A coordinator or a worker."""

    def __init__(self, *arguments: str, within: Sequence[str] = ()) -> None:
        self._ready: dict[str, Any] = {}
        super().__init__(_DAEMON, [*arguments, "--attached", "--job", "drills"], within)
        self.say(SECRET)

    def ready(self, limit: Limit) -> dict[str, Any]:
        """What it said when it was ready."""
        with self.changed:
            self.changed.wait_for(lambda: self._ready or self.ended, limit.left("the start of a daemon"))
        assert self._ready, f"a daemon did not start:\n{''.join(self.log)}"
        return self._ready

    def heard(self, line: str) -> None:
        if line.startswith("ready "):
            self._ready = json.loads(line.removeprefix("ready "))


class Answer:
    """What a rank process answers to a command."""

    def __init__(self, process: RankProcess, number: int, what: str) -> None:
        self._process = process
        self._number = number
        self._what = what

    @property
    def there(self) -> bool:
        return self._number in self._process.answers

    def get(self, limit: Limit) -> dict[str, Any]:
        """The answer, well or not; raises Hang where none comes, and AssertionError where the process has ended."""
        process, answers = self._process, self._process.answers
        what = f"{self._what!r} on {process.who}"
        with process.changed:
            process.changed.wait_for(lambda: self._number in answers or process.ended, limit.left(what))
        if self._number not in answers and not process.ended:
            limit.left(what)
        assert self._number in answers, f"{what} was not answered: the process has ended\n{''.join(process.log)}"
        return answers[self._number]

    def value(self, limit: Limit) -> Any:
        """The value; raises AssertionError where the command failed."""
        found = self.get(limit)
        if not found["ok"]:
            raise AssertionError(f"{self._what} on {self._process.who} failed: {found['text']}")
        return found["value"]


class RankProcess(Process):
    """A client process (`rank.py`). What it submits and hears is noted in `events`."""

    def __init__(self, worker: int, number: int, within: Sequence[str] = ()) -> None:
        self.worker = worker  # on whose host it is
        self.who = f"client {number}"
        self.events: list[Event] = []
        self.answers: dict[int, dict[str, Any]] = {}
        self.joined: list[tuple[int, int]] = []  # (key, generation)
        self.spoilt = False  # it has misbehaved, and is of no more use
        self._asked = 0
        super().__init__(_RANK, (), within, {"COLLECTIVED_SECRET": SECRET})
        self.who += f" (pid {self.pid})"

    @property
    def owes_answer(self) -> bool:
        """Whether it has not answered all that it was asked."""
        return len(self.answers) < self._asked

    def ask(self, do: str, now: bool = False, **arguments: Any) -> Answer:
        """Sends a command: to be carried out in turn, or at once in a thread of its own."""
        self._asked += 1
        self.say(json.dumps({"id": self._asked, "do": do, "now": now, **arguments}))
        return Answer(self, self._asked, do)

    def gone(self) -> None:
        """Notes that it owes nothing any more: it was killed, or stopped for good."""
        self.spoilt = True
        with self.changed:
            self.events.append(Gone(self.who))

    def outcomes(self) -> list[Outcome]:
        with self.changed:
            return [event for event in self.events if isinstance(event, Outcome)]

    def heard(self, line: str) -> None:
        told = json.loads(line)
        if "answer" in told:
            self.answers[told["answer"]] = told
        elif told.get("record") == "joined":
            self.joined.append((told["key"], told["generation"]))
        elif "record" in told:
            self.events.append(_event(self.who, told))


def _event(who: str, told: dict[str, Any]) -> Event:
    kind = told.pop("record")
    if kind == "submit":
        return Submit(who, **told)
    told["code"] = Code(told["code"])
    told["missing"] = tuple(told.get("missing", ()))
    told["differing"] = tuple(told.get("differing", ()))
    return Outcome(who, **told)
