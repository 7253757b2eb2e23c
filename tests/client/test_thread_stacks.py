"""Where the threads of this process are, in a few short lines."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import settle

from collectived import thread_stacks
from collectived.thread_stacks import OWN_THREADS, describe_threads
from collectived_proto.ipc.messages import MAX_STACK

HERE = Path(__file__).name
MAIN = threading.main_thread().ident or 0


def load_batch(stop: threading.Event) -> None:
    stop.wait()


def climb(height: int, stop: threading.Event) -> None:
    if height:
        climb(height - 1, stop)
    else:
        load_batch(stop)


@contextmanager
def thread(name: str, body: Callable[[threading.Event], object] = load_batch) -> Iterator[threading.Thread]:
    """A thread that is inside of `load_batch`."""
    stop = threading.Event()
    running = threading.Thread(target=body, args=(stop,), name=name)
    running.start()
    try:
        settle(
            lambda: (
                "load_batch" in describe_threads(running.ident or 0).partition("\n")[0] or name.startswith(OWN_THREADS)
            )
        )
        yield running
    finally:
        stop.set()
        running.join()


def test_the_thread_that_is_asked_for_comes_first_its_innermost_call_too() -> None:
    with thread("loader") as loader:
        first, *_ = describe_threads(loader.ident or 0).splitlines()
    assert re.fullmatch(rf"threading.py:\d+ in wait <- threading.py:\d+ in wait <- {HERE}:\d+ in load_batch", first)


def test_other_threads_are_told_by_their_names() -> None:
    with thread("loader"), thread("pin memory") as pin:
        told = describe_threads(pin.ident or 0).splitlines()
    assert any(line.startswith("thread loader: threading.py:") for line in told[1:]), told
    assert not any(line.startswith("thread pin memory") for line in told)


def test_threads_of_this_library_are_not_told() -> None:
    with thread(f"{OWN_THREADS}stacks"):
        assert "load_batch" not in describe_threads(MAIN)


def test_where_the_thread_that_is_asked_for_has_ended_another_comes_first() -> None:
    with thread("loader"):
        assert describe_threads(-1)


def test_the_innermost_calls_of_a_deep_stack_are_told() -> None:
    with thread("climber", lambda stop: climb(100, stop)) as climber:
        first, *_ = describe_threads(climber.ident or 0).splitlines()
    assert first.count(" <- ") == 5 and first.endswith("in climb")


def test_of_calls_deep_in_libraries_the_innermost_one_of_the_program_is_told_too() -> None:
    def wait_in_a_library(stop: threading.Event) -> None:
        walk = "def walk(n, wait):\n    walk(n - 1, wait) if n else wait()\n"
        names: dict[str, Any] = {}
        exec(compile(walk, "/usr/lib/python3/dist-packages/walks.py", "exec"), names)
        names["walk"](20, stop.wait)

    stop = threading.Event()
    walker = threading.Thread(target=wait_in_a_library, args=(stop,))
    walker.start()
    try:
        settle(lambda: "walks.py" in describe_threads(walker.ident or 0).partition("\n")[0])
        first, *_ = describe_threads(walker.ident or 0).splitlines()
    finally:
        stop.set()
        walker.join()
    assert re.search(rf"walks.py:2 in walk <- … <- {HERE}:\d+ in wait_in_a_library$", first), first


def test_calls_within_this_package_are_one_by_its_outer_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with thread("climber", lambda stop: climb(3, stop)) as climber:
        monkeypatch.setattr(thread_stacks, "_OWN_PREFIX", __file__)
        first, *_ = describe_threads(climber.ident or 0).splitlines()
    assert first.endswith("in wait <- <lambda> of collectived")


def test_however_many_threads_there_are_the_text_is_short() -> None:
    stop = threading.Event()
    crowd = [threading.Thread(target=climb, args=(20, stop), name="n" * 500) for _ in range(20)]
    for one in crowd:
        one.start()
    told = describe_threads(crowd[0].ident or 0)
    stop.set()
    for one in crowd:
        one.join()
    assert len(told.encode()) <= MAX_STACK and len(told.splitlines()) <= 8
