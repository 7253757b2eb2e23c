"""A thread that tells the worker where the threads of this process are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import settle

from collectived.shared.stack_answers import StackAnswers
from collectived_proto.ipc import messages

TOKEN = bytes(range(messages.TOKEN_BYTES))
QUESTION = messages.encode_bare(messages.MessageType.STACK_ASKED)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "door"))
        listener.listen()
        listener.settimeout(30)
        yield listener


def enter(door: socket.socket) -> tuple[StackAnswers, socket.socket]:
    """What answers, and the worker's end of its socket."""
    answers = StackAnswers(door.getsockname(), TOKEN, "the worker")
    worker, _ = door.accept()
    worker.settimeout(30)
    assert messages.parse_hello(worker.recv(256))[0] == TOKEN
    return answers, worker


def answering() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "collectived-stacks"]


def test_each_question_is_answered_with_where_the_thread_is_that_connected(door: socket.socket) -> None:
    answers, worker = enter(door)
    with worker:
        for _ in range(2):
            worker.send(QUESTION)
            told = worker.recv(1 << 16)
            assert messages.parse_type(told) is messages.MessageType.STACK
            assert (
                messages.parse_text(told)
                .partition("\n")[0]
                .partition(" <- ")[0]
                .endswith("in test_each_question_is_answered_with_where_the_thread_is_that_connected")
            )
        answers.close()
        assert worker.recv(1 << 16) == b""
    settle(lambda: not answering())


def test_the_thread_ends_when_the_worker_does(door: socket.socket) -> None:
    answers, worker = enter(door)
    worker.close()
    settle(lambda: not answering())
    answers.close()


WAITS_FOR_A_SIGNAL = """
import os, signal, socket, sys, threading
from collectived.shared.stack_answers import StackAnswers
answers = StackAnswers(sys.argv[1], bytes(16), "the worker")
sys.stdin.readline()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)  # which ends a process in which any thread takes it
print(signal.sigwait({signal.SIGUSR1}).name, threading.active_count())
"""


def test_the_thread_takes_no_signal_that_another_is_to_wait_for(door: socket.socket) -> None:
    command = [sys.executable, "-c", WAITS_FOR_A_SIGNAL, door.getsockname()]
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # whose threads would take it
    with subprocess.Popen(command, env=alone, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        worker, _ = door.accept()
        with worker:
            worker.settimeout(30)
            worker.recv(256)
            worker.send(QUESTION)
            worker.recv(1 << 16)  # it runs
            assert process.communicate("\n", timeout=30)[0] == "SIGUSR1 2\n"


def test_a_worker_that_does_not_ask_gets_no_socket_and_no_thread(door: socket.socket) -> None:
    answers = StackAnswers(door.getsockname(), b"", "the worker")
    assert not answering()
    answers.close()


def test_where_nobody_listens_the_session_goes_on_without(tmp_path: Path) -> None:
    answers = StackAnswers(str(tmp_path / "nowhere"), TOKEN, "the worker")
    assert not answering()
    answers.close()
    answers.invalidate_after_fork()
