"""The loop of `collectived top`: asks in a thread, so that keys are never kept waiting, and draws what is known."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import click

from collectived_launcher.status.find import Target, ask
from collectived_launcher.top.frame import Frame, Known, frame, heard, not_heard
from collectived_launcher.top.state import State, keys, press
from collectived_launcher.top.terminal import Ended, Screen, Typed
from collectived_proto.local import jobs
from collectived_proto.v1.status_pb2 import StatusReply

_TICK = 1.0  # seconds after which ages are drawn anew
_LEAST = 0.05  # seconds between questions, whatever was asked for
_ASK_ENDS = 3.0  # a question that is under way takes no longer: the interpreter should not end over it


class Watch:
    """
    target: who is asked.
    reply: the first answer.
    interval: seconds between questions.
    """

    def __init__(self, target: Target, reply: StatusReply, interval: float) -> None:
        self.job_over = False
        self._target = target
        self._known = heard(reply, time.monotonic())
        self._state = State(interval=interval)
        self._asked = time.monotonic()
        self._asking: threading.Thread | None = None
        self._answer: Known | Exception | None = None  # from the thread, taken by the loop

    def run(self) -> int:
        """Until somebody ends it, or the job is over; the signal that ended it, or 0."""
        with Screen() as screen:
            ended_by = self._watch(screen)
        if self._asking is not None:
            self._asking.join(_ASK_ENDS)
        return ended_by

    def _watch(self, screen: Screen) -> int:
        while not (self._state.over or self.job_over):
            self._take_answer(screen)
            shown = frame(self._known, self._state, time.monotonic(), *screen.size)
            screen.draw(shown)
            for event in screen.wait(self._pause()):
                match event:
                    case Ended(number):
                        return number
                    case Typed(b""):
                        return 0
                    case Typed(data):
                        self._press(keys(data), shown)
        return 0

    def _press(self, pressed: list[str], shown: Frame) -> None:
        for key in pressed:
            self._state = press(self._state, key, shown.rows, shown.page)

    def _pause(self) -> float:
        """Seconds until something is to be done."""
        if self._asking is not None or self._state.paused:
            return _TICK
        return min(_TICK, self._due() - time.monotonic())

    def _due(self) -> float:
        return self._asked if self._state.ask_now else self._asked + max(self._state.interval, _LEAST)

    def _take_answer(self, screen: Screen) -> None:
        answer = self._answer
        if isinstance(answer, Exception):  # a fault of ours, which must not end in a thread that nobody looks at
            raise answer
        if answer is not None:
            self._answer, self._asking = None, None
            if not self._state.paused or self._state.ask_now:
                self._known = answer
            self._state = replace(self._state, ask_now=False)
            self.job_over = bool(answer.trouble) and over(self._target)
        wanted = self._state.ask_now or not self._state.paused
        if self._asking is None and wanted and time.monotonic() >= self._due():
            self._asked = time.monotonic()
            self._asking = threading.Thread(target=self._ask, args=(screen,), daemon=True)
            self._asking.start()

    def _ask(self, screen: Screen) -> None:
        try:
            self._answer = heard(ask(self._target), time.monotonic())
        except click.ClickException as error:
            self._answer = not_heard(self._known, error.message.replace("\n", " "), time.monotonic())
        except Exception as error:
            self._answer = error
        screen.wake()


def over(target: Target) -> bool:
    """Whether the job that was found running does no longer. Of a worker that was named nobody can tell."""
    if not target.origin.startswith("job "):
        return False
    return all(f"job {job.job}" != target.origin for job in jobs.running())
