"""A process that has imported what others need, and becomes each of them by a fork; `forked_process` asks it to.

It has one thread, and has opened nothing, so that a child of it is as good as a process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import select
import socket
import struct
import sys
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STATUS = struct.Struct("i")  # as waitstatus_to_exitcode has it
MAX_REQUEST = 1 << 17  # bytes of one request


@dataclass(frozen=True)
class Request:
    """What a child is to be: the program, as after `python -c`, and what surrounds it."""

    program: str
    folder: str
    environment: dict[str, str]


def main(descriptor: int, modules: Sequence[str]) -> None:
    """Import those modules, and serve whoever holds the other end of the socket; in a child, be what it asked for."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child need not copy these pages
    with contextlib.suppress(KeyboardInterrupt):
        request = serve(socket.socket(fileno=descriptor))
    if request is not None:
        run(request)
        end()


def serve(control: socket.socket) -> Request | None:
    """Fork for every request. Return in the child what it is to do; in the server None, when nobody asks any more."""
    ends: dict[int, tuple[int, int]] = {}  # a descriptor of each child: its id, and the pipe that is told how it ended
    with control:
        polled = select.poll()
        polled.register(control, select.POLLIN)
        while True:
            for descriptor, _ in polled.poll():
                if descriptor in ends:
                    polled.unregister(descriptor)
                    bury(descriptor, *ends.pop(descriptor))
                    continue
                data, passed, _, _ = socket.recv_fds(control, MAX_REQUEST, 4)
                if not data:
                    return None
                *streams, told = passed
                pid = os.fork()
                if not pid:
                    for child, (_, pipe) in ends.items():
                        os.close(child)
                        os.close(pipe)
                    os.close(told)
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                        os.close(stream)
                    return Request(**json.loads(data))
                for stream in streams:
                    os.close(stream)
                child = os.pidfd_open(pid)
                ends[child] = (pid, told)
                polled.register(child, select.POLLIN)
                control.send(str(pid).encode())


def bury(descriptor: int, pid: int, told: int) -> None:
    """Tell how a child ended, and only then let its id be another's."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(BrokenPipeError):
        os.write(told, STATUS.pack(code))
    os.waitpid(pid, 0)
    os.close(told)
    os.close(descriptor)


def run(request: Request) -> None:
    """Be `python -u -c program`."""
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    sys.argv = ["-c"]
    open_streams()
    exec(compile(request.program, "<string>", "exec"), set_main())


def open_streams() -> None:
    """Make the standard streams anew: those of before know what their descriptors were."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(open(0, "rb", closefd=False), "utf-8")  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _open_unbuffered(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _open_unbuffered(2, "backslashreplace")  # type: ignore[misc]


def _open_unbuffered(descriptor: int, errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), "utf-8", errors, write_through=True)


def set_main() -> dict[str, Any]:
    """Make a new module the main one; what it holds."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    return module.__dict__


def end(status: int = 0) -> None:
    """End as after a program that has come to its end, but leave the modules together.

    An interpreter takes them apart, and in a child that copies nearly every page of the server: five times the
    processor time of all the rest. What a program could see of it still happens: threads are waited for, exit
    functions are called, and what the program has made is collected.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # the program has none any more
            stream.flush()
    os._exit(status)
