"""The protocol of launcher and agent: messages as frames over two pipes.

A frame is two lengths (header, body; 4 bytes each, big-endian), a header (JSON: the kind of message and its fields) and
a body (the message's one field of bytes, or nothing). Both are bounded, and every field has the type that its message
says. A side that sends anything else is disconnected.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from collectived_launcher.hosts.loop import Loop

VERSION: Final = 2
GREETING: Final = b"\0collectived agent 1\n"  # output of a login shell before it is ignored
MAX_HEADER, MAX_BODY = 1 << 22, 1 << 17
_MAX_PREAMBLE = 1 << 16
_LENGTHS = struct.Struct(">II")
_CHUNK = 1 << 16
_MAX_PIPE_SIZE = 1 << 20  # bytes; Linux lets users have no larger ones


class AgentProtocolError(Exception):
    """The other side said what no agent or launcher says."""


@dataclass(frozen=True, slots=True)
class LauncherHello:
    """Launcher: this is the job. `silence`: seconds without a message after which a side gives the other up."""

    protocol: int
    release: str
    folder: str
    silence: float


@dataclass(frozen=True, slots=True)
class AgentHello:
    """Agent: this is what I have; `facts` as in `host.HostFacts`. `trouble`: why I cannot serve, or ''."""

    protocol: int
    facts: dict[str, Any]
    trouble: str


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Launcher: run this as process `number`. `body` is the secret, where it is `attached`."""

    number: int
    argv: list[str]
    variables: dict[str, str]
    folder: str
    attached: bool
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    number: int
    pid: int


@dataclass(frozen=True, slots=True)
class OutputLine:
    """Agent: the process wrote this line to standard output (1) or standard error (2)."""

    number: int
    stream: int
    body: bytes


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """Agent: the process is over. `trouble`: why it could not be run, or ''."""

    number: int
    status: int
    trouble: str


@dataclass(frozen=True, slots=True)
class SignalProcess:
    number: int
    signum: int


@dataclass(frozen=True, slots=True)
class CloseStdin:
    """Launcher: close the standard input of this process, so that it ends in order."""

    number: int


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """Launcher: do this task and answer under this number."""

    number: int
    task: str
    about: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TaskReply:
    number: int
    answer: dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Either: I am still there."""


Message = (
    LauncherHello
    | AgentHello
    | StartProcess
    | ProcessStarted
    | OutputLine
    | ProcessEnded
    | SignalProcess
    | CloseStdin
    | TaskRequest
    | TaskReply
    | KeepAlive
)
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        LauncherHello,
        AgentHello,
        StartProcess,
        ProcessStarted,
        OutputLine,
        ProcessEnded,
        SignalProcess,
        CloseStdin,
        TaskRequest,
        TaskReply,
        KeepAlive,
    )
}


def encode(message: Message) -> bytes:
    """The frame of a message."""
    said = asdict(message)
    body: bytes = said.pop("body", b"")
    header = json.dumps({"kind": type(message).__name__, **said}).encode()
    if len(header) > MAX_HEADER or len(body) > MAX_BODY:
        raise ValueError(f"a {type(message).__name__} of {len(header)} + {len(body)} bytes is too large to be sent")
    return _LENGTHS.pack(len(header), len(body)) + header + body


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """
        Raises:
            AgentProtocolError: what came is no message.
        """
        self._rest += data
        while len(self._rest) >= _LENGTHS.size:
            header, body = _LENGTHS.unpack_from(self._rest)
            if header > MAX_HEADER or body > MAX_BODY:
                raise AgentProtocolError(f"announced a message of {header} + {body} bytes")
            end = _LENGTHS.size + header + body
            if len(self._rest) < end:
                return
            cut = _LENGTHS.size + header
            message = _decode(bytes(self._rest[_LENGTHS.size : cut]), bytes(self._rest[cut:end]))
            del self._rest[:end]
            yield message


def _decode(header: bytes, body: bytes) -> Message:
    try:
        said = json.loads(header)
        kind = _KINDS[said.pop("kind")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AgentProtocolError(f"sent no message: {header[:80]!r}") from error
    expected = {item.name: str(item.type) for item in fields(kind)}
    if "body" in expected:
        said["body"] = body
    elif body:
        raise AgentProtocolError(f"sent a {kind.__name__} with {len(body)} bytes that it does not have")
    if set(said) != set(expected) or not all(_has_type(said[name], wanted) for name, wanted in expected.items()):
        raise AgentProtocolError(f"sent a {kind.__name__} of other fields: {header[:200]!r}")
    return kind(**said)


def _has_type(value: Any, wanted: str) -> bool:
    match wanted:
        case "int":
            return type(value) is int
        case "float":
            return type(value) in (int, float)
        case "str":
            return isinstance(value, str)
        case "bytes":
            return isinstance(value, bytes)
        case "bool":
            return isinstance(value, bool)
        case "list[str]":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case "dict[str, str]":
            return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
        case _:
            return isinstance(value, dict)


class AgentChannel:
    """Messages over two descriptors, which it owns and never waits for.

    `heard` is called for each message, `ended` once: with '' at the end of the stream, else with the error of the other
    side's messages. No message is read after it, but messages may still be sent.

    Args:
        greeted: whether `GREETING` is still to come; bytes before it go to `preamble` when the connection ends without
            it.
    """

    def __init__(
        self,
        loop: Loop,
        readable: int,
        writable: int,
        heard: Callable[[Message], None],
        ended: Callable[[str], None],
        greeted: bool = True,
    ) -> None:
        self._loop, self._in, self._out = loop, readable, writable
        self._on_message, self._on_disconnect, self._has_greeted = heard, ended, greeted
        self._frames = Frames()
        self._queue: deque[bytes] = deque()
        self._writing = self._eof_pending = False
        self._reading = True
        self.is_open = True  # messages can be sent
        self.preamble = b""
        self.backlog = 0  # bytes that the other side has not taken yet
        for descriptor in (readable, writable):
            os.set_blocking(descriptor, False)
        loop.register(readable, self._read)

    def send(self, message: Message) -> None:
        self._write(encode(message))

    def send_greeting(self) -> None:
        """The agent's first word."""
        self._write(GREETING)

    def write_eof(self) -> None:
        """End the sending direction; the other side sees that once it has read the rest.

        Its messages are still read.
        """
        self._eof_pending = True
        if self.is_open and not self._queue:
            self._stop_writing()

    def close(self) -> None:
        """Close both directions. Messages that were not taken yet are lost."""
        self._stop_writing()
        self._stop_reading()

    def _stop_writing(self) -> None:
        if self.is_open:
            self.is_open = False
            if self._writing:
                self._loop.unregister(self._out)
            self._queue.clear()
            self.backlog = 0
            os.close(self._out)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.unregister(self._in)
            os.close(self._in)

    def _write(self, data: bytes) -> None:
        if self.is_open:
            self._queue.append(data)
            self.backlog += len(data)
            if not self._writing:
                self._flush()

    def _flush(self) -> None:
        try:
            while self._queue:
                written = os.write(self._out, self._queue[0])
                self.backlog -= written
                rest = self._queue.popleft()[written:]
                if rest:
                    self._queue.appendleft(rest)
        except BlockingIOError:
            pass
        except OSError:  # the other side reads no more; the end of its own messages says so too, and in order
            self._queue.clear()
            self.backlog = 0
        if self._eof_pending and not self._queue:
            self._stop_writing()
        elif bool(self._queue) is not self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.register(self._out, self._flush, write=True)
            else:
                self._loop.unregister(self._out)

    def _read(self) -> None:
        try:
            data = os.read(self._in, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect("")
            return
        try:
            for message in self._frames.feed(self._strip_greeting(data)):
                self._on_message(message)
                if not self._reading:
                    return
        except AgentProtocolError as error:
            self._disconnect(str(error))

    def read_remaining(self) -> None:
        """Read the bytes that are there now: the writers have ended."""
        for _ in range(_MAX_PIPE_SIZE // _CHUNK):
            if self._reading:
                self._read()

    def _strip_greeting(self, data: bytes) -> bytes:
        if self._has_greeted:
            return data
        self.preamble += data
        before, found, rest = self.preamble.partition(GREETING)
        if not found:
            if len(before) > _MAX_PREAMBLE:
                raise AgentProtocolError("does not greet as an agent does")
            return b""
        self._has_greeted, self.preamble = True, before
        return rest

    def _disconnect(self, why: str) -> None:
        if self._reading:
            self._stop_reading()
            self._on_disconnect(why)
