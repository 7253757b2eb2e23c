"""Launchers whose daemons and clients on this host are forks of themselves, and so is whatever of ours they run.

Everything up to `exec` is as ever: pipes, groups, the reaper, and the death of a parent. Then a child becomes the
program instead of an interpreter that imports it, which takes hundreds of milliseconds of processor time. Jobs that are
started by `subprocess` say that the other way works too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import mmap
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.fork_server import end, open_streams, set_main
from tests.forked_daemon import is_secured
from tests.forked_process import ForkedProcess, fork_server

WARM = (
    *("tests.forked_launch", "tests.e2e.launcher.run_job", "collectived_launcher.launch.cli", "collectived"),
    *("collectived.connection.rpc", "collectived.shared.segment_channel", "collectived_runtime.__main__"),
    *("collectived_runtime.worker.server", "collectived_runtime.coordinator.server"),
    *("collectived_launcher.cluster.supervisor", "collectived_launcher.cluster.cli", "collectived_launcher.status.cli"),
    *("collectived.bench.measure", "collectived_launcher.bench.cli"),
)
_DAEMON = "from collectived_runtime.__main__ import main; main()"
_MODULE = "from tests.forked_launch import run_module; run_module({!r})"
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_LIBC = ctypes.CDLL(None, use_errno=True)


def start_launcher(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
    output: Path | None = None,
    fresh_programs: bool = False,
) -> ForkedProcess:
    """Start `python -m MODULE ARGUMENTS`, a launcher.

    Args:
        output: the file into which goes all that it says, where there is one.
        fresh_programs: programs that are not ours are no forks: nothing may lie below them on their stacks.
    """
    assert tuple(command[:2]) == (sys.executable, "-m"), command
    told = None if output is None else str(output)
    program = f"from tests.forked_launch import run; run({list(command[2:])!r}, {told!r}, {fresh_programs!r})"
    return fork_server(*WARM).start(program, os.environ if environment is None else environment, folder=folder)


def run_launcher(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
    timeout: float | None = None,
    said: str = "",
    fresh_programs: bool = False,
) -> subprocess.CompletedProcess[str]:
    """The same to its end, with `said` as its standard input."""
    with start_launcher(command, environment, folder, fresh_programs=fresh_programs) as launcher:
        try:
            stdout, stderr = launcher.communicate(said, timeout)
        except BaseException:
            launcher.kill()
            raise
    return subprocess.CompletedProcess(list(command), launcher.wait(), stdout, stderr)


def run(command: Sequence[str], output: str | None = None, fresh_programs: bool = False) -> None:
    """Be the launcher."""
    _Popen.forks_programs = not fresh_programs
    if output is not None:
        descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)
    vars(subprocess)["Popen"] = _Popen
    module, *arguments = command
    with contextlib.suppress(OSError):
        _describe([sys.executable, "-m", *command], os.environ)
    if module == "collectived_launcher":
        module = "collectived_launcher.__main__"
    sys.argv = [module, *arguments]
    sys.exit(importlib.import_module(module).main())


class _Popen(subprocess.Popen[Any]):
    forks_programs = True

    def __init__(self, args: Any, **options: Any) -> None:  # torchrun gives it by its name
        is_alone = len(os.listdir("/proc/self/task")) == 1  # beside other threads a fork has to become another program
        if isinstance(args, str) or options.get("shell") or not is_alone:
            super().__init__(args, **options)
            return
        environment = dict(os.environ if options.get("env") is None else options["env"])
        prepare, kept = options.pop("preexec_fn", None), options.get("pass_fds", ())
        become = functools.partial(_become, tuple(args), environment, prepare, kept)
        super().__init__(args, preexec_fn=become, **options)


def _become(
    words: tuple[str, ...], environment: Mapping[str, str], prepare: Callable[[], None] | None, kept: Sequence[int]
) -> None:
    """Be the program in this child; return where it is no program of ours, which `exec` is left to."""
    if prepare is not None:
        prepare()
    found = _find_program(words, environment)
    if found is None:
        return
    program, file, arguments = found
    try:
        _describe(words, environment)
    except OSError:  # this kernel lets nobody do so
        return
    first = 3
    for descriptor in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):  # no owner, which is below on the stack, misses them
        os.closerange(first, descriptor)
        first = descriptor + 1
    gc.freeze()
    gc.enable()
    _reset_signals()
    if not any(word.startswith("collectived_launcher") for word in words):  # a supervisor starts daemons in its turn
        vars(subprocess)["Popen"] = _Popen.__base__
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    open_streams()
    _live(program, file)


def _find_program(words: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, str, list[str]] | None:
    """What an interpreter would run: the program, its file, and its arguments; None where none of ours does."""
    if shutil.which(words[0], path=environment.get("PATH")) != sys.executable:
        return None
    options = list(itertools.takewhile(lambda word: word in ("-P", "-u"), words[1:]))
    kind, *rest = words[1 + len(options) :] or ("",)
    if kind == "-c" and rest and _Popen.forks_programs:
        return rest[0], "<string>", ["-c", *rest[1:]]
    if kind == "-m" and rest and rest[0].startswith("collectived"):
        if is_secured(rest):
            return None
        module, *arguments = rest
        return _DAEMON if module == "collectived_runtime" else _MODULE.format(module), "<string>", [module, *arguments]
    if kind.endswith(".py") and Path(kind).exists() and _Popen.forks_programs:
        return Path(kind).read_text(), kind, [kind, *rest]
    return None


def run_module(name: str) -> None:
    """Be `python -m` of a module that may have been imported before, of which `runpy` would warn."""
    if not hasattr(sys.modules.get(name), "__path__"):
        sys.modules.pop(name, None)
    sys.modules.pop(f"{name}.__main__", None)
    runpy.run_module(name, None, "__main__", alter_sys=True)


def _reset_signals() -> None:
    """As `exec` and the start of an interpreter leave them."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _live(program: str, file: str) -> None:
    """Be `python -u` with that program to its end."""
    main, status = set_main(), 0
    if file != "<string>":
        main["__file__"] = file
        sys.path[0] = str(Path(file).resolve().parent)
    try:
        exec(compile(program, file, "exec"), main)
    except SystemExit as left:
        if left.code is not None and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        assert error.__traceback__ is not None
        error.__traceback__ = error.__traceback__.tb_next  # this function is no part of the program
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    end(status)


class _MemoryMap(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def _describe(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Let the kernel show this command line and environment of this process, as if it had been run with them."""
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    shown = mmap.mmap(-1, len(words + variables), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shown.write(words + variables)
    at = ctypes.addressof(ctypes.c_char.from_buffer(shown))
    _shown.append(shown)
    told = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()  # from the third field on, as proc(5) counts
    start_code, end_code, start_stack = (int(told[field - 3]) for field in (26, 27, 28))
    start_data, end_data, start_brk = (int(told[field - 3]) for field in (45, 46, 47))
    _LIBC.sbrk.restype = ctypes.c_uint64
    ends = at, at + len(words), at + len(words), at + len(words + variables)
    about = _MemoryMap(
        *(start_code, end_code, start_data, end_data, start_brk, _LIBC.sbrk(0), start_stack), *ends, 0, 0, 0xFFFFFFFF
    )
    if _LIBC.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(about), ctypes.c_ulong(ctypes.sizeof(about)), 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_shown: list[mmap.mmap] = []
