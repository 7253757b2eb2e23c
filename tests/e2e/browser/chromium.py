"""Debian's Chromium without a screen, spoken to over a pipe by the DevTools protocol: JSON that ends with NUL."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

PATIENCE = 30.0
# Puts both pipes where a browser expects them. In a program of its own: tests beside others should not fork.
_PLACED = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(pipe), fcntl.F_DUPFD_CLOEXEC, 10) for pipe in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page of one browser. What it fetched, and what its console said, is kept."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="cd-chromium-", dir="/tmp")
        to_browser, self._write = _pipe()
        self._read, from_browser = _pipe()

        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _PLACED, str(to_browser), str(from_browser)),
                program,
                "--headless=new",
                "--no-sandbox",  # the tests may run as root; the only page it opens is ours
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-extensions",
                "--disable-background-networking",
                "--no-first-run",
                "--no-proxy-server",
                f"--user-data-dir={self._profile}",
                "--remote-debugging-pipe",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._profile},
            pass_fds=(to_browser, from_browser),
            process_group=0,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.console: list[str] = []
        self.fetched: list[str] = []

    def __enter__(self) -> Browser:
        try:
            (target,) = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
            attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the browser with all its processes, and removes what it wrote."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, url: str) -> None:
        """Goes there, and returns when it has been loaded."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def look_like(self, width: int, height: int, scheme: str, phone: bool = False) -> None:
        """The size of the window, and whether its user likes it light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Waits until an expression in the page is true; its value."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if value := self.evaluate(expression):
                return value
            self._hear(0.05)
        shown = self.evaluate("document.body.innerText")
        raise AssertionError(f"never: {expression}\nconsole: {self.console}\nthe page says:\n{shown}")

    def screenshot(self, whole: bool = True) -> bytes:
        """A PNG of the page."""
        data: str = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        return base64.b64decode(data)

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for answer in self._hear(deadline - time.monotonic()):
                if answer.get("id") == number:
                    assert "error" not in answer, (method, answer)
                    return answer["result"]
        raise AssertionError(f"the browser did not answer {method} within {PATIENCE} s")

    def _hear(self, seconds: float) -> list[dict[str, Any]]:
        """What the browser said, answers and events, as soon as it said something."""
        if not select.select([self._read], [], [], max(0.0, seconds))[0]:
            return []
        data = os.read(self._read, 1 << 20)
        assert data, "the browser ended"
        *whole, self._buffer = (self._buffer + data).split(b"\0")
        messages = [json.loads(text) for text in whole]
        for message in messages:
            told = message.get("params", {})
            match message.get("method"):
                case "Log.entryAdded":
                    self.console.append(told["entry"]["text"])
                case "Runtime.exceptionThrown":
                    self.console.append(json.dumps(told["exceptionDetails"]))
                case "Runtime.consoleAPICalled":
                    self.console.append(json.dumps(told["args"]))
                case "Network.requestWillBeSent":
                    self.fetched.append(told["request"]["url"])
        return messages


def _pipe() -> tuple[int, int]:
    """A pipe whose ends have numbers that are in nobody's way."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 100) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
