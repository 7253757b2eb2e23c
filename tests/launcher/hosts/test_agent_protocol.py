"""Messages between launcher and agent: what is said arrives, and nothing else is understood."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator

import pytest

from collectived_launcher.hosts.agent_protocol import (
    GREETING,
    MAX_BODY,
    MAX_HEADER,
    AgentChannel,
    AgentHello,
    AgentProtocolError,
    CloseStdin,
    Frames,
    KeepAlive,
    LauncherHello,
    Message,
    OutputLine,
    ProcessEnded,
    ProcessStarted,
    SignalProcess,
    StartProcess,
    TaskReply,
    TaskRequest,
    encode,
)
from collectived_launcher.hosts.loop import Loop

MESSAGES: list[Message] = [
    LauncherHello(1, "0.1", "job-0", 30.0),
    LauncherHello(1, "0.1", "job-0", 30),
    AgentHello(1, {"hostname": "b", "interfaces": [{"name": "lo"}]}, ""),
    StartProcess(7, ["python", "-c", "print('ü')"], {"A": "b"}, "", True, b"secret"),
    ProcessStarted(7, 4242),
    OutputLine(7, 2, b"\xff\x00 no text"),
    OutputLine(7, 1, b""),
    ProcessEnded(7, -9, ""),
    SignalProcess(7, 15),
    CloseStdin(7),
    TaskRequest(8, "dial", {"targets": [["10.0.0.1", 7450]]}),
    TaskReply(8, {"failures": [""]}),
    KeepAlive(),
]


def test_messages_arrive_however_the_bytes_are_cut() -> None:
    data = b"".join(encode(message) for message in MESSAGES)
    for size in (1, 7, 64, len(data)):
        frames = Frames()
        heard = [message for at in range(0, len(data), size) for message in frames.feed(data[at : at + size])]
        assert heard == MESSAGES


def frame(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">II", len(text), len(body)) + text + body


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">II", MAX_HEADER + 1, 0),
        struct.pack(">II", 2, MAX_BODY + 1),
        frame(b"{"),
        frame([]),
        frame({"kind": "Sing"}),
        frame({"kind": ["KeepAlive"]}),
        frame({"kind": "KeepAlive", "loud": True}),
        frame({"kind": "KeepAlive"}, b"body"),
        frame({"kind": "SignalProcess", "number": 1}),
        frame({"kind": "SignalProcess", "number": 1, "signum": True}),
        frame({"kind": "SignalProcess", "number": "1", "signum": 9}),
        frame({"kind": "StartProcess", "number": 1, "argv": "sh", "variables": {}, "folder": "", "attached": False}),
        frame(
            {
                "kind": "StartProcess",
                "number": 1,
                "argv": ["sh"],
                "variables": {"A": 1},
                "folder": "",
                "attached": False,
            }
        ),
        frame(b"[" * 100_000),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(AgentProtocolError):
        list(Frames().feed(data))


def test_a_secret_is_not_in_the_words_of_a_message() -> None:
    assert "5ec2e7" not in repr(StartProcess(1, ["sh"], {}, "", True, b"5ec2e7"))


@pytest.fixture
def loop() -> Iterator[Loop]:
    with Loop() as made:
        yield made


def test_much_that_nobody_reads_waits_and_then_arrives_whole(loop: Loop) -> None:
    readable, writable = os.pipe()
    other_readable, other_writable = os.pipe()
    heard: list[Message] = []
    ends: list[str] = []
    speaker = AgentChannel(loop, other_readable, writable, heard.append, ends.append)
    said = [OutputLine(1, 1, b"%d" % number + b"x" * 50_000) for number in range(40)]
    speaker.send(said[0])
    for line in said[1:]:
        speaker.send(line)
    assert speaker.backlog > 1_000_000
    speaker.write_eof()
    listener = AgentChannel(loop, readable, other_writable, heard.append, ends.append)
    assert loop.run_until(lambda: ends == [""], 20.0)
    assert heard == said and speaker.backlog == 0
    for talk in (listener, speaker):
        talk.close()


def test_who_does_not_greet_is_not_listened_to(loop: Loop) -> None:
    heard: list[Message] = []
    ends: list[str] = []
    for noise, end in ((b"motd\n", ""), (b"x" * 100_000, "does not greet as an agent does")):
        readable, writable = os.pipe()
        unread, unwritten = os.pipe()
        talk = AgentChannel(loop, readable, unwritten, heard.append, ends.append, greeted=False)
        os.write(writable, noise[:60_000])
        loop.run_once()
        if len(noise) > 60_000:
            os.write(writable, noise[60_000:])
        os.close(writable)
        assert loop.run_until(lambda: bool(ends), 20.0)
        assert (ends.pop(), heard) == (end, [])
        talk.close()
        os.close(unread)


def test_what_comes_before_the_greeting_is_kept_as_noise(loop: Loop) -> None:
    readable, writable = os.pipe()
    unread, unwritten = os.pipe()
    heard: list[Message] = []
    talk = AgentChannel(loop, readable, unwritten, heard.append, lambda why: None, greeted=False)
    os.write(writable, b"welcome\n" + GREETING + encode(KeepAlive()))
    assert loop.run_until(lambda: bool(heard), 20.0)
    assert (heard, talk.preamble) == ([KeepAlive()], b"welcome\n")
    talk.close()
    for descriptor in (writable, unread):
        os.close(descriptor)
