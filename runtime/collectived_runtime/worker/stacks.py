"""Where the threads of a client's process are: asked when others wait for a rank of it, and bounded in all respects.

The client's library answers, by a thread that reads a socket of its own, or over the stream of a session without shared
memory. One question is under way at a time, and at most two in a second. A client that does not answer in time is
described by what the kernel says about the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from collectived_proto.ipc import messages
from collectived_proto.report.phrases import sanitize_text

ANSWER_SECONDS = 0.2  # for an answer
PAUSE_SECONDS = 0.5  # between two questions; questions meanwhile get the latest answer
_MAX_LINE = 500  # characters about one thread
_QUESTION = messages.encode_bare(messages.MessageType.STACK_ASKED)
_STATES = {
    "T": "its process is stopped",
    "t": "a debugger has stopped its process",
    "D": "its process waits in the kernel, for a device or a file system",
    "R": "it runs, perhaps in C code that holds the GIL",
    "S": "it sleeps, perhaps in C code that holds the GIL",
}  # by the kernel's letter for the main thread

StackTaker = Callable[[str], None]  # is given one line for each thread; '': nothing is known


class StackSampler:
    """Asks the client of one session. In the event loop's thread.

    Args:
        pid: of its process on this host; 0: not known.
        reject: called where it answers without a question.
    """

    def __init__(self, pid: int, reject: Callable[[], None]) -> None:
        self._pid = pid
        self._reject = reject
        self._ask: Callable[[], object] | None = None
        self._detach: Callable[[], object] = lambda: None
        self._is_closed = False
        self._takers: list[StackTaker] = []  # that wait for the answer,
        self._late_takers: list[StackTaker] = []  # and those that know that it is late
        self._timer: asyncio.TimerHandle | None = None
        self._is_unanswered = False
        self._asked_at = -math.inf
        self._latest = ""

    def sample(self, take: StackTaker) -> None:
        """Call `take` with an answer no older than `PAUSE_SECONDS`; where that is late, with the reason before."""
        if self._ask is None:
            take("")
        elif self._takers:
            self._takers.append(take)
        elif self._is_unanswered:
            take(describe_silence(self._pid))
        elif time.monotonic() < self._asked_at + PAUSE_SECONDS:
            take(self._latest)
        else:
            self._is_unanswered, self._asked_at = True, time.monotonic()
            self._takers.append(take)
            self._timer = asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._on_silence)
            self._ask()

    def answer(self, text: str) -> None:
        """Take an answer.

        Raises:
            MalformedMessage: there was no question.
        """
        if not self._is_unanswered:
            raise messages.MalformedMessage("it has sent where its threads are, without being asked")
        self._is_unanswered = False
        self._latest = clean_stack(text)
        self._tell(self._latest)

    def _tell(self, text: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        takers, self._takers, self._late_takers = self._late_takers + self._takers, [], []
        for take in takers:
            take(text)

    def _on_silence(self) -> None:
        self._late_takers, self._takers = self._takers, []
        for take in self._late_takers:
            take(describe_silence(self._pid))

    def attach(self, connected: socket.socket) -> None:
        """Ask over this socket from now on."""
        if self._is_closed or self._ask is not None:
            connected.close()
            return
        loop = asyncio.get_running_loop()
        connected.setblocking(False)

        def detach() -> None:
            loop.remove_reader(connected.fileno())
            connected.close()

        def ask() -> None:
            with contextlib.suppress(OSError):  # its end is on its way
                connected.send(_QUESTION)

        self._ask, self._detach = ask, detach
        loop.add_reader(connected.fileno(), self._read, connected)

    def _read(self, connected: socket.socket) -> None:
        try:
            data = connected.recv(messages.MAX_STACK + 1)  # a longer answer is cut
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            if data and messages.parse_type(data) is not messages.MessageType.STACK:
                raise messages.MalformedMessage("another message than where its threads are")
            if data:
                self.answer(messages.parse_text(data))
                return
        except messages.MalformedMessage:
            self._reject()
        self.close()

    async def stream_questions(self) -> AsyncIterator[None]:
        """Yields each time that the client is to be asked, until `close`."""
        questions: asyncio.Queue[bool] = asyncio.Queue()
        self._ask, self._detach = lambda: questions.put_nowait(True), lambda: questions.put_nowait(False)
        while not self._is_closed and await questions.get():
            yield

    def close(self) -> None:
        """Ask no more."""
        self._is_closed, self._ask = True, None
        detach, self._detach = self._detach, lambda: None
        detach()
        self._tell("")


def clean_stack(text: str) -> str:
    """Clean a client's answer for others: short lines without control characters."""
    lines = sanitize_text(text[: messages.MAX_STACK]).splitlines()
    return "\n".join(line[:_MAX_LINE] for line in lines if line.strip())


def describe_silence(pid: int) -> str:
    """Why a process of this host does not answer, as far as the kernel says."""
    state = _STATES.get(_read_state(pid), "") if pid else ""
    return f"no answer: {state}" if state else "no answer from its process"


def _read_state(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):  # it has ended, or /proc hides it
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""
