"""Tasks of a host for the launcher besides running programs: about its addresses, the program's files, the job's file.

| task | about | answer |
|---|---|---|
| `address` | `interface`: its name, a network, or ''; `towards`: names of other hosts | `address`, or `trouble` |
| `listen` | `address` | `port` of that address that was free; connections to it are accepted and closed |
| `dial` | `targets`: a list of [host, port] | `failures`: for each target, '' or why it cannot be reached |
| `hush` | | ends `listen` |
| `program` | `argv`, `folder`; `path`: the program's own PATH, or '' | `trouble` if a file of it is missing |
| `publish` | a `JobFile`, less the process that is asked | `trouble` if it cannot be written |
| `token` | `token`: with which one may look, for a file in the job's folder | `path` of the file, or `trouble` |
| `failures` | `ranks`: client -> how often it was started again | `reports`: their failure files, by rank |
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from collectived_launcher.hosts.host import NetworkInterface, TaskResult
from collectived_launcher.hosts.loop import Loop
from collectived_proto.ipc import job_files

DIAL_SECONDS = 8.0  # for one address to let us in
_MAX_FAILURE_FILE = 1 << 16  # bytes
FOLDER_HINT = "a program runs in the same folder on every host: make it, or name another with --chdir"
PROGRAM_HINT = "give a path to it, or an interpreter first: -- python train.py"
_COPY_HINT = (
    "copy it to this path on every host, keep it in a folder that all hosts share, or name it relative to "
    "--chdir FOLDER"
)
_INTERPRETER_HINT = "install it there, or name an interpreter that every host has: -- python3 train.py"
_EXECUTABLE_HINT = "chmod +x it, or name its interpreter first: -- python train.py"
_DISCARD_PORT = 9  # a port: nothing is ever sent to it, but the kernel chooses a route


class HostTasks:
    """Runs tasks of one host. State that they keep between two of them ends with `close`.

    Args:
        path: the PATH that programs get there; '' for our own.
    """

    def __init__(self, loop: Loop, folder: Path, path: str = "") -> None:
        self._loop, self._folder, self._path = loop, folder, path or os.environ.get("PATH", os.defpath)
        self._listeners: list[socket.socket] = []
        self._dials: set[_DialAttempt] = set()

    def run(self, task: str, about: Mapping[str, Any], answered: Callable[[TaskResult], None]) -> None:
        """Calls `answered` once, later."""
        answer: TaskResult = {}
        try:
            match task:
                case "address":
                    answer = {"address": choose_address(about["interface"], about["towards"])}
                case "listen":
                    answer = {"port": self._listen(about["address"])}
                case "dial":
                    self._dial_all([(str(host), int(port)) for host, port in about["targets"]], answered)
                    return
                case "hush":
                    self.close()
                case "program":
                    check_program_files(about["argv"], about["folder"], about["path"] or self._path)
                case "publish":
                    job = job_files.JobFile(pid=os.getpid(), **{**about, "workers": tuple(about["workers"])})
                    job_files.write_job_file(job, self._folder.name)
                case "token":
                    answer = {"path": write_token(self._folder, str(about["token"]))}
                case "failures":
                    answer = {"reports": read_failure_files(self._folder, about["ranks"])}
                case _:
                    answer = {"trouble": f"no such task: {task}"}
        except (OSError, LookupError, ValueError, TypeError) as error:
            answer = {"trouble": str(error)}
        self._loop.call_later(0.0, partial(answered, answer))

    def close(self) -> None:
        for listener in self._listeners:
            self._loop.unregister(listener.fileno())
            listener.close()
        self._listeners.clear()
        for dial in list(self._dials):
            dial.finish("given up")

    def _listen(self, address: str) -> int:
        listener = socket.create_server((address, 0), family=_family(address))
        listener.setblocking(False)
        self._listeners.append(listener)
        self._loop.register(listener.fileno(), partial(_accept_and_close, listener))
        return int(listener.getsockname()[1])

    def _dial_all(self, targets: list[tuple[str, int]], answered: Callable[[TaskResult], None]) -> None:
        failures = [""] * len(targets)
        left = len(targets)

        def over(number: int, dial: _DialAttempt) -> None:
            nonlocal left
            self._dials.discard(dial)
            failures[number] = dial.failure
            left -= 1
            if not left:
                self._loop.call_later(0.0, partial(answered, {"failures": failures}))

        if not targets:
            self._loop.call_later(0.0, partial(answered, {"failures": []}))
        for number, target in enumerate(targets):
            dial = _DialAttempt(self._loop, target, partial(over, number))
            self._dials.add(dial)
            dial.start()


class _DialAttempt:
    """One attempt to be let in somewhere."""

    def __init__(self, loop: Loop, target: tuple[str, int], over: Callable[[_DialAttempt], None]) -> None:
        self.failure = ""
        self._loop, self._target, self._on_done = loop, target, over
        self._socket: socket.socket | None = None
        self._ended = False

    def start(self) -> None:
        host, port = self._target
        try:
            self._socket = socket.socket(_family(host))
            self._socket.setblocking(False)
            code = self._socket.connect_ex((host, port))
            failure = "" if code in (0, errno.EINPROGRESS) else os.strerror(code)
        except (OSError, OverflowError) as error:  # no descriptor, no address, no port
            failure = str(error)
        if failure or self._socket is None:
            self._loop.call_later(0.0, partial(self.finish, failure))
            return
        self._loop.register(self._socket.fileno(), self._on_connect, write=True)
        self._loop.call_later(DIAL_SECONDS, partial(self.finish, f"no answer within {DIAL_SECONDS:g} s"))

    def _on_connect(self) -> None:
        assert self._socket is not None
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.finish(os.strerror(code) if code else "")

    def finish(self, failure: str) -> None:
        if self._ended:
            return
        self._ended, self.failure = True, failure
        if self._socket is not None:
            with contextlib.suppress(KeyError):  # it was never watched
                self._loop.unregister(self._socket.fileno())
            self._socket.close()
        self._on_done(self)


def _accept_and_close(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.accept()[0].close()


def write_token(folder: Path, token: str) -> str:
    """Puts the viewing token where scrapers of this user find it, for as long as the job's folder is there."""
    path = folder / "viewing-token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(f"{token}\n")
    return str(path)


def check_program_files(argv: Sequence[str], folder: str, path: str) -> None:
    """Check that this host has the folder, the program and, for Python, the script that a rank would run.

    A program that is found may still not start; its start reports that.

    Raises:
        LookupError: one of them is missing; says which, and what to do.
    """
    if folder and not os.path.isdir(folder):
        raise LookupError(f"no folder {folder} there; {FOLDER_HINT}")
    program = os.path.join(folder, argv[0])
    if os.path.dirname(argv[0]):
        _check_file(program, _INTERPRETER_HINT if _is_python(program) else _COPY_HINT)
        if not os.access(program, os.X_OK):
            raise LookupError(f"{os.path.normpath(program)} is not executable there; {_EXECUTABLE_HINT}")
    else:  # a relative entry of PATH begins where the program runs
        places = os.pathsep.join(os.path.join(folder, entry) for entry in path.split(os.pathsep))
        if not shutil.which(argv[0], path=places):
            raise LookupError(f"{argv[0]!r} is not in the PATH there; {PROGRAM_HINT}")
    if script := find_python_script(argv):
        _check_file(os.path.join(folder, script), _COPY_HINT)


def _check_file(path: str, hint: str) -> None:
    if not os.path.exists(path):
        raise LookupError(f"no file {os.path.normpath(path)} there; {hint}")


def _is_python(program: str) -> bool:
    """Whether a program is an interpreter of Python, by its name."""
    return re.fullmatch(r"(?:python|pypy)[\d.]*", os.path.basename(program)) is not None


def find_python_script(argv: Sequence[str]) -> str:
    """The file that an interpreter of Python is to run; '' for another program, and where the options leave it open."""
    if not _is_python(argv[0]):
        return ""
    words = iter(argv[1:])
    for word in words:
        if re.fullmatch(r"-[A-Za-z]*[WX]|--check-hash-based-pycs", word):
            next(words, None)  # its value
        elif not word.startswith("-"):
            return word
        elif word == "-" or word.startswith("--") or re.match(r"-[A-Za-z]*[cm]", word):
            return ""  # other long options may have a value, too
    return ""


def failure_file(folder: str | Path, rank: int, restart: int) -> str:
    """Where a client says what ended it, once for each time it is started."""
    return f"{folder}/failure-{rank}-{restart}.json"


def read_failure_files(folder: Path, restarts: Mapping[str, int]) -> dict[str, Any]:
    """Read the failure files of clients, by rank, without those that are missing or unreadable."""
    found = {}
    for rank, restart in restarts.items():
        with contextlib.suppress(OSError, ValueError), open(failure_file(folder, int(rank), restart), "rb") as file:
            found[rank] = json.loads(file.read(_MAX_FAILURE_FILE))
    return found


def choose_address(interface: str, towards: list[str]) -> str:
    """The address of this host by which others are to reach it.

    Args:
        interface: its name, or a network; '' for the one by which packets to `towards` leave.
        towards: names or addresses of other hosts; the first that is known here counts.

    Raises:
        LookupError: there is none; says what there is.
    """
    found = list_interfaces()
    if interface:
        return _find_interface_address(interface, found)
    failures = []
    for host in towards:
        try:
            family, kind, _, _, where = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError as error:
            failures.append(f"{host}: {error.strerror or error}")
    raise LookupError(
        f"its address is unknown, for it knows no route to the other hosts ({'; '.join(failures)}); "
        f"choose one of its interfaces with --interface: {_format_interfaces(found)}"
    )


def _find_interface_address(interface: str, found: tuple[NetworkInterface, ...]) -> str:
    try:
        network = ipaddress.ip_network(interface, strict=False) if "/" in interface else None
    except ValueError as error:
        raise LookupError(f"--interface {interface!r} is neither an interface nor a network: {error}") from None
    for candidate in found:
        if network is None and candidate.name == interface:
            return candidate.address
        if network is not None and ipaddress.ip_address(candidate.address) in network:
            return candidate.address
    raise LookupError(f"it has no interface {interface!r}; it has {_format_interfaces(found)}")


def _format_interfaces(found: tuple[NetworkInterface, ...]) -> str:
    return ", ".join(f"{one.name} ({one.address}/{one.prefix})" for one in found) or "none"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class _SockAddr(ctypes.Structure):
    _fields_ = [("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26)]


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
    ("mask", ctypes.POINTER(_SockAddr)),
    ("other", ctypes.POINTER(_SockAddr)),
    ("more", ctypes.c_void_p),
]
_IFF_UP = 1
_ADDRESS_LAYOUT = {
    socket.AF_INET: (2, 4),
    socket.AF_INET6: (6, 16),
}  # offset and length of the address in sockaddr's data


def list_interfaces() -> tuple[NetworkInterface, ...]:
    """Addresses of the interfaces that are up, IPv4 first; without addresses that mean something on one link alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(head)):
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    found = []
    try:
        entry = head
        while entry:
            one = entry.contents
            if one.address and one.mask and one.flags & _IFF_UP and one.address.contents.family in _ADDRESS_LAYOUT:
                there = _read_address_bytes(one.address.contents)
                prefix = sum(
                    byte.bit_count() for byte in _read_address_bytes(one.mask.contents, one.address.contents.family)
                )
                if not ipaddress.ip_address(there).is_link_local:
                    found.append(NetworkInterface(one.name.decode(), str(ipaddress.ip_address(there)), prefix))
            entry = one.next
    finally:
        libc.freeifaddrs(head)
    return tuple(sorted(found, key=lambda interface: ":" in interface.address))


def _read_address_bytes(address: _SockAddr, family: int | None = None) -> bytes:
    offset, length = _ADDRESS_LAYOUT[socket.AddressFamily(address.family if family is None else family)]
    return bytes(address.data[offset : offset + length])
