"""Questions where the threads of a client's process are: few, and nobody waits for who does not answer."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
from tests.waiting import settle

from collectived_proto.ipc import messages
from collectived_runtime.worker import stacks
from collectived_runtime.worker.stacks import StackSampler, clean_stack, describe_silence


class Scene:
    """A sampler, the client's end of its socket, and what those who ask were told."""

    def __init__(self) -> None:
        mine, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.client.setblocking(False)
        self.rejected = 0
        self.told: list[str] = []
        self.sampler = StackSampler(0, self.reject)
        self.sampler.attach(mine)

    def reject(self) -> None:
        self.rejected += 1

    def ask(self) -> None:
        self.sampler.sample(self.told.append)

    async def hear(self) -> bytes:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.client, 1 << 16), 30)

    def say(self, text: str) -> None:
        self.client.send(messages.encode_bare(messages.MessageType.STACK, text))

    async def settle(self, fact: Callable[[], object]) -> None:
        while not fact():
            await asyncio.sleep(0.001)


def played(play: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        try:
            await asyncio.wait_for(play(scene), 60)
        finally:
            scene.sampler.close()
            scene.client.close()

    asyncio.run(run())


def test_all_who_ask_at_a_time_are_told_the_answer_to_one_question() -> None:
    async def play(scene: Scene) -> None:
        scene.ask()
        scene.ask()
        assert messages.parse_type(await scene.hear()) is messages.MessageType.STACK_ASKED
        scene.say("data.py:88 in load")
        await scene.settle(lambda: scene.told)
        scene.ask()  # within a second
        assert scene.told == ["data.py:88 in load"] * 3
        with pytest.raises(BlockingIOError):
            scene.client.recv(100)

    played(play)


def test_it_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "PAUSE_SECONDS", 0.0)

    async def play(scene: Scene) -> None:
        for text in ("first", "second"):
            scene.ask()
            await scene.hear()
            scene.say(text)
            await scene.settle(partial(scene.told.__contains__, text))

    played(play)


def test_who_does_not_answer_is_said_to_be_silent_and_not_asked_again_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(stacks, "PAUSE_SECONDS", 0.0)

    async def play(scene: Scene) -> None:
        scene.ask()
        await scene.settle(lambda: scene.told)
        scene.ask()
        assert scene.told == ["no answer from its process"] * 2
        await scene.hear()
        with pytest.raises(BlockingIOError):
            scene.client.recv(100)
        scene.say("late")
        await scene.settle(lambda: scene.told[-1] == "late")
        assert len(scene.told) == 3  # who waited for it hears it all the same
        scene.ask()
        await scene.hear()
        scene.say("in time")
        await scene.settle(lambda: scene.told[-1] == "in time")

    played(play)


@pytest.mark.parametrize(
    "message",
    [
        messages.encode_bare(messages.MessageType.STACK, "nobody has asked"),
        messages.encode_bare(messages.MessageType.PING),
        b"\xff" * 100_000,
    ],
    ids=["unasked", "another message", "nonsense"],
)
def test_who_says_something_else_is_asked_no_more(message: bytes) -> None:
    async def play(scene: Scene) -> None:
        scene.client.send(message)
        await scene.settle(lambda: scene.rejected)
        assert await scene.hear() == b""
        scene.ask()
        assert scene.told == [""] and scene.rejected == 1

    played(play)


def test_who_hangs_up_amid_a_question_leaves_nobody_waiting() -> None:
    async def play(scene: Scene) -> None:
        scene.ask()
        scene.client.close()
        await scene.settle(lambda: scene.told)
        assert scene.told == [""] and not scene.rejected

    played(play)


def test_a_socket_that_comes_when_the_session_has_ended_is_closed() -> None:
    async def play(scene: Scene) -> None:
        scene.sampler.close()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            scene.sampler.attach(mine)
            assert theirs.recv(10) == b""

    played(play)


def test_a_stream_of_questions_ends_with_the_session() -> None:
    async def run() -> None:
        sampler, told, asked = StackSampler(0, lambda: None), list[str](), 0

        async def client() -> None:
            nonlocal asked
            async for _ in sampler.stream_questions():
                asked += 1
                sampler.answer("data.py:88 in load")

        talking = asyncio.ensure_future(client())
        await asyncio.sleep(0)
        sampler.sample(told.append)
        while not told:
            await asyncio.sleep(0.001)
        sampler.close()
        await asyncio.wait_for(talking, 30)
        assert (told, asked) == (["data.py:88 in load"], 1)

    asyncio.run(run())


def test_what_a_client_says_is_cut_and_cleaned() -> None:
    assert clean_stack("a\x1b[31m\x00b\n\n  \nc" + "d" * 5000) == "a\ufffd[31m\ufffdb\nc" + "d" * 499
    assert len(clean_stack("\n".join(["e" * 400] * 100))) <= messages.MAX_STACK


def test_of_a_silent_process_the_kernel_says_that_it_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            settle(lambda: "sleeps" in describe_silence(process.pid))
            process.send_signal(signal.SIGSTOP)
            settle(lambda: describe_silence(process.pid) == "no answer: its process is stopped")
        finally:
            process.kill()
    assert describe_silence(process.pid) == "no answer from its process"
