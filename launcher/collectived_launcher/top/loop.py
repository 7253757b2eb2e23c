"""The loop of `collectived top`: asks in a thread, so that keys are never kept waiting, and draws what is known."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import click

from collectived_launcher.status.discovery import Target, request_status
from collectived_launcher.top.frame import Frame, LatestStatus, make_frame, status_after_failure, status_from_reply
from collectived_launcher.top.state import TopState, apply_key, parse_keys
from collectived_launcher.top.terminal import ExitSignal, KeyInput, Screen
from collectived_proto.ipc import job_files
from collectived_proto.v1.status_pb2 import StatusReply

_REDRAW_SECONDS = 1.0  # seconds after which ages are drawn anew
_MIN_INTERVAL = 0.05  # seconds between questions, whatever was asked for
_JOIN_TIMEOUT = 3.0  # a question that is under way takes no longer: the interpreter should not end over it


class TopLoop:
    """Asks `target` every `interval` seconds; `reply` is its first answer."""

    def __init__(self, target: Target, reply: StatusReply, interval: float) -> None:
        self.is_job_over = False
        self._target = target
        self._latest = status_from_reply(reply, time.monotonic())
        self._state = TopState(interval=interval)
        self._last_request_time = time.monotonic()
        self._request_thread: threading.Thread | None = None
        self._answer: LatestStatus | Exception | None = None  # from the thread, taken by the loop

    def run(self) -> int:
        """Run until the user ends it, or the job is over. Return the signal that ended it, or 0."""
        with Screen() as screen:
            ended_by = self._loop(screen)
        if self._request_thread is not None:
            self._request_thread.join(_JOIN_TIMEOUT)
        return ended_by

    def _loop(self, screen: Screen) -> int:
        while not (self._state.quit_requested or self.is_job_over):
            self._update(screen)
            shown = make_frame(self._latest, self._state, time.monotonic(), *screen.size)
            screen.draw(shown)
            for event in screen.wait(self._wait_seconds()):
                match event:
                    case ExitSignal(number):
                        return number
                    case KeyInput(b""):
                        return 0
                    case KeyInput(data):
                        self._apply_keys(parse_keys(data), shown)
        return 0

    def _apply_keys(self, pressed: list[str], shown: Frame) -> None:
        for key in pressed:
            self._state = apply_key(self._state, key, shown.row_count, shown.page)

    def _wait_seconds(self) -> float:
        """Seconds until something is to be done."""
        if self._request_thread is not None or self._state.paused:
            return _REDRAW_SECONDS
        return min(_REDRAW_SECONDS, self._next_request_time() - time.monotonic())

    def _next_request_time(self) -> float:
        return (
            self._last_request_time
            if self._state.ask_now
            else self._last_request_time + max(self._state.interval, _MIN_INTERVAL)
        )

    def _update(self, screen: Screen) -> None:
        answer = self._answer
        if isinstance(answer, Exception):  # a defect, which must be raised in the main thread
            raise answer
        if answer is not None:
            self._answer, self._request_thread = None, None
            if not self._state.paused or self._state.ask_now:
                self._latest = answer
            self._state = replace(self._state, ask_now=False)
            self.is_job_over = bool(answer.error) and has_job_ended(self._target)
        wanted = self._state.ask_now or not self._state.paused
        if self._request_thread is None and wanted and time.monotonic() >= self._next_request_time():
            self._last_request_time = time.monotonic()
            self._request_thread = threading.Thread(target=self._request, args=(screen,), daemon=True)
            self._request_thread.start()

    def _request(self, screen: Screen) -> None:
        try:
            self._answer = status_from_reply(request_status(self._target), time.monotonic())
        except click.ClickException as error:
            self._answer = status_after_failure(self._latest, error.message.replace("\n", " "), time.monotonic())
        except Exception as error:
            self._answer = error
        screen.wake()


def has_job_ended(target: Target) -> bool:
    """Whether the job that was found running has ended. False for a named worker, whose job is not known."""
    if not target.origin.startswith("job "):
        return False
    return all(f"job {job.job}" != target.origin for job in job_files.list_running_jobs())
