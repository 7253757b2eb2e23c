"""The terminal: taken, and given back as it was, however this ends.

While it is taken, keys come at once and are not echoed, the picture is on the alternate screen, and signals are events
of the one wait instead of interruptions, so that nothing can end between taking and giving back.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.live import Live

_EXIT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_CAUGHT_SIGNALS = (*_EXIT_SIGNALS, signal.SIGWINCH, signal.SIGTSTP)
_WAKE_BYTE = 0  # no signal has this number


@dataclass(frozen=True, slots=True)
class KeyInput:
    """Keys; nothing: the terminal is gone."""

    data: bytes


@dataclass(frozen=True, slots=True)
class ExitSignal:
    """A signal says that this is to end."""

    signum: int


def check_terminal() -> str:
    """Why nothing can be shown live here; '' where it can."""
    for stream, name in ((sys.stdin, "standard input"), (sys.stdout, "standard output")):
        if not stream.isatty():
            return f"{name} is none"
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return f"TERM={os.environ.get('TERM', '')} names none that can move its cursor"
    return ""


class Screen:
    """The taken terminal."""

    def __init__(self) -> None:
        # The real size is asked before each picture; COLUMNS and LINES of the environment would freeze it.
        self._console = Console(
            _environ={key: os.environ[key] for key in ("TERM", "COLORTERM", "NO_COLOR") if key in os.environ}
        )
        self._wake_read, self._wake_write = os.pipe()
        self._wake_lock = threading.Lock()
        self._wake_pipe_open = True

    def __enter__(self) -> Screen:
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, self._wake_read)
            stack.callback(self._close_wake_pipe)
            stack.enter_context(_redirect_signals(self._wake_write))
            stack.enter_context(self._take_terminal())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        size = os.get_terminal_size(sys.stdout.fileno())
        return max(size.columns, 1), max(size.lines, 1)

    def draw(self, picture: RenderableType) -> None:
        self._console.size = self.size
        self._live.update(picture, refresh=True)

    def wake(self) -> None:
        """Ends the wait that goes on, from any thread."""
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # full: it will wake anyway
            if self._wake_pipe_open:
                os.write(self._wake_write, bytes([_WAKE_BYTE]))

    def _close_wake_pipe(self) -> None:
        with self._wake_lock:  # else a late thread would write into whatever has the number next
            self._wake_pipe_open = False
            os.close(self._wake_write)

    def wait(self, seconds: float) -> list[KeyInput | ExitSignal]:
        """Wait for events, and return them; [] after that time."""
        typed = sys.stdin.fileno()
        readable, _, _ = select.select([typed, self._wake_read], [], [], max(0.0, seconds))
        events: list[KeyInput | ExitSignal] = []
        if self._wake_read in readable:
            for number in os.read(self._wake_read, 4096):
                if number in _EXIT_SIGNALS:
                    events.append(ExitSignal(number))
                elif number == signal.SIGTSTP:
                    self._suspend()
        if typed in readable:
            events.append(KeyInput(_read(typed)))
        return events

    def _suspend(self) -> None:
        """Gives the terminal back for as long as this process is stopped."""
        self._terminal_stack.close()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._terminal_stack.enter_context(self._live_mode())

    @contextlib.contextmanager
    def _take_terminal(self) -> Iterator[None]:
        with contextlib.ExitStack() as self._terminal_stack:
            self._terminal_stack.enter_context(self._live_mode())
            yield

    @contextlib.contextmanager
    def _live_mode(self) -> Iterator[None]:
        typed = sys.stdin.fileno()
        before = termios.tcgetattr(typed)
        try:
            tty.setcbreak(typed, termios.TCSADRAIN)
            self._live = Live(console=self._console, screen=True, auto_refresh=False)
            with self._live:
                yield
        finally:
            with contextlib.suppress(OSError, termios.error):  # it may be gone
                termios.tcsetattr(typed, termios.TCSAFLUSH, before)


@contextlib.contextmanager
def _redirect_signals(descriptor: int) -> Iterator[None]:
    os.set_blocking(descriptor, False)
    former = {number: signal.signal(number, lambda *_: None) for number in _CAUGHT_SIGNALS}
    former_descriptor = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former_descriptor)
        for number, handler in former.items():
            signal.signal(number, handler)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1024)
    except OSError:
        return b""
