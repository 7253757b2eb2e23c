"""A client process of the drills: one rank at a time, told line by line what to do, telling line by line what came.

`python -m tests.drills.rank` reads commands from its standard input, one JSON object per line, and carries them out in
order, those with `now` at once in the thread that reads. Every command is answered; every submission and every outcome
is a record of its own, written before and after the call, so that what a killed process had done is known.

Misbehaviour goes over the process's own sockets (all its Unix SOCK_SEQPACKET sockets), behind the library's back.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import queue
import signal
import socket
import stat
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
from tests.drills.soak_steps import Soak

import collectived as cd
from collectived.shared import seqpacket
from collectived_proto.ipc import messages

Command = dict[str, Any]

STREAM = socket.SOCK_STREAM
_MOST_MESSAGES = 1_000_000
_writing = threading.Lock()


def tell(**record: Any) -> None:
    line = json.dumps(record) + "\n"
    with _writing:
        sys.stdout.write(line)
        sys.stdout.flush()


def seqpackets() -> set[int]:
    """Descriptors of this process's Unix SOCK_SEQPACKET sockets: the session's and the doorbells'."""
    return _sockets(lambda sock: (sock.family, sock.type & 0xF) == (socket.AF_UNIX, socket.SOCK_SEQPACKET))


def streams() -> set[int]:
    """Descriptors of its TCP sockets: those of gRPC."""
    return _sockets(lambda sock: sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type & 0xF == STREAM)


def _sockets(wanted: Callable[[socket.socket], bool]) -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                if wanted(sock):
                    found.add(descriptor)
        except OSError:  # closed meanwhile
            continue
    return found


class Rank:
    """What the commands act on: at most one session, and one group of it at a time."""

    def __init__(self) -> None:
        self.session: cd.Session | None = None
        self.group: cd.Group | None = None
        self.doorbell = -1
        self.counted: dict[int, int] = defaultdict(int)  # generation -> instances submitted
        self.works: dict[str, tuple[cd.Work[Any], int, int]] = {}
        self.stopping = threading.Event()
        self.calling = False  # the library: here SIGINT is felt

    @property
    def here(self) -> cd.Group:
        assert self.group is not None, "join a group first"
        return self.group

    # Membership

    def connect(self, worker: str, timeout: float = 10.0) -> Any:
        self.close()
        self.stopping.clear()
        self.session = cd.connect(worker, timeout=timeout)

    def join(
        self,
        name: str,
        size: Any,
        rank: int | None = None,
        timeout: float = 10.0,
        settle: float = 5.0,
        idle: bool = False,
    ) -> Any:
        assert self.session is not None, "connect first"
        before = seqpackets()
        wanted = tuple(size) if isinstance(size, list) else size
        self.group = self.session.join(name, wanted, rank=rank, timeout=timeout, settle=settle, idle=idle)
        self.doorbell = min(seqpackets() - before, default=-1)
        return self._joined()

    def rejoin(self, timeout: float = 10.0, size: Any = None) -> Any:
        before = seqpackets()
        self.here.rejoin(tuple(size) if isinstance(size, list) else size, timeout=timeout)
        self.doorbell = min(seqpackets() - before, default=-1)
        return self._joined()

    def _joined(self) -> dict[str, int]:
        group = self.here
        return {"key": group.key, "generation": group.generation, "rank": group.rank, "size": group.size}

    def leave(self) -> Any:
        if self.group is not None:
            self.group.leave()

    def close(self) -> Any:
        self.group = None
        if self.session is not None:
            session, self.session = self.session, None
            session.close()

    def abort(self, reason: str) -> Any:
        self.here.abort(reason)

    def fail(self, text: str) -> Any:
        """Leaves the group's block by an exception."""
        with contextlib.suppress(ValueError), self.here:
            raise ValueError(text)

    # Collectives

    def sum(self, fill: float, count: int = 1000, timeout: float | None = None, lazy: bool = False) -> Any:
        """One all_reduce in which every element of this rank is `fill`."""
        generation, instance = self._submitted(timeout, fill, lazy=lazy)
        vector, options = _vector(fill, count), _options(timeout)
        return self._outcome(generation, instance, lambda: self.here.all_reduce("sum", vector, options))

    def start(self, fill: float, count: int = 1000, timeout: float | None = None, lazy: bool = False) -> Any:
        """The same without waiting for it."""
        generation, instance = self._submitted(timeout, fill, lazy=lazy)
        work = self.here.all_reduce("sum", _vector(fill, count), _options(timeout), async_op=True)
        self.works[f"{generation}/{instance}"] = (work, generation, instance)

    def collect(self) -> Any:
        """Waits for all that was started, in order."""
        while self.works:
            work, generation, instance = self.works.pop(next(iter(self.works)))
            self._outcome(generation, instance, work.result)

    def call(self, call: str, site: str = "usual.py", timeout: float | None = None, waits: bool = True) -> Any:
        """Evaluates `group.<call>`, as if it stood in line 1 of `site`; `options` in it are those of `timeout`."""
        code = compile(f"group.{call}", site, "eval")
        names = {"group": self.here, "np": np, "cd": cd, "options": _options(timeout)}
        generation, instance = self._submitted(timeout, None, waits=waits)
        self._outcome(generation, instance, lambda: eval(code, names))

    def soak(self, seed: str, last: int, timeout: float, act: str = "", at: int = -1) -> Any:
        """Does what `soak_steps` says for each instance before `last`, until the generation is over; what came of it.

        As instance `at` it does `act` instead: differ, abort, fail, leave.
        """
        soak = Soak(self.here, seed, _options(timeout), at if act == "differ" else -1)
        if soak.play(at if act and act != "differ" else last) and act and act != "differ":
            getattr(self, act)(*[f"{act} of a soak"] * (act != "leave"))
        return asdict(soak.report)

    def until_others_wait(self, fill: float) -> Any:
        """Sums until others wait to come in; how often."""
        count = 0
        while not self.here.waiting and self.sum(fill):
            count += 1
        return count

    def halves(self, color: int) -> Any:
        """Splits the group, sums ones in the part, and leaves it; the sum."""
        found: list[float] = []
        generation, instance = self._submitted(None, None)

        def split() -> None:
            part = self.here.split(color)
            assert part is not None
            with part:
                found.append(part.all_reduce("sum", 1.0))

        self._outcome(generation, instance, split)
        return found[0]

    def joins(self, names: list[str], size: int, rank: int, timeout: float = 20.0) -> Any:
        """Joins many groups at once, sums ones in each, and leaves them; the keys, generations, sums, and attempts.

        As in the documented loop: where a member is lost before it has joined, the group is joined again.
        """
        session = self.session
        assert session is not None, "connect first"

        def one(name: str) -> list[Any]:
            group = session.join(name, size, rank=rank, timeout=timeout)
            for attempt in itertools.count(1):
                try:
                    found = [group.key, group.generation, group.all_reduce("sum", 1.0), attempt]
                    group.leave()
                    return found
                except cd.errors.UnavailableError:
                    group.rejoin(timeout=timeout)
            raise AssertionError

        with ThreadPoolExecutor(len(names)) as threads:
            return list(threads.map(one, names))

    def load(self, fill: float, count: int, timeout: float | None = None) -> Any:
        """Sums again and again until one rank is told to `stop`, or until a sum fails; whether all went well."""
        vector, asked = _vector(fill, count), 0.0
        while not asked:
            generation, instance = self._submitted(timeout, fill)
            stops: list[float] = []

            def both(stops: list[float] = stops) -> Any:
                value: list[Any] = [vector, float(self.stopping.is_set())]
                result, stop = self.here.all_reduce("sum", value, _options(timeout))
                stops.append(stop)
                return result

            if not self._outcome(generation, instance, both):
                return False
            asked = stops[0]
        return True

    def churn(self, name: str, size: list[int], settle: float, timeout: float) -> Any:
        """The documented loop: sums until others wait or something fails, then goes on with whoever comes."""
        begin: Callable[[], Any] = functools.partial(self.join, name, size, timeout=timeout, settle=settle)
        while not self.stopping.is_set():
            try:
                joined = begin()
            except cd.errors.DeadlineExceededError:  # nobody else is there
                continue
            begin = functools.partial(self.rejoin, timeout=timeout)
            tell(record="joined", **joined)
            crowd = self.here.size == size[1]
            while self.sum(self.here.rank + 1.0, timeout=timeout):
                if self.stopping.is_set() or (self.here.waiting and not crowd):
                    break
        self.leave()

    def stop(self) -> Any:
        self.stopping.set()

    def _submitted(self, timeout: float | None, value: float | None, waits: bool = True, lazy: bool = False) -> Any:
        group = self.here
        generation = group.generation
        instance = self.counted[generation]
        self.counted[generation] = instance + 1
        tell(
            record="submit",
            rank=group.rank,
            size=group.size,
            generation=generation,
            instance=instance,
            at=time.monotonic(),
            timeout=timeout or 0.0,
            value=value,
            waits=waits,
            lazy=lazy,
        )
        return generation, instance

    def _outcome(self, generation: int, instance: int, call: Callable[[], Any]) -> bool:
        """Whether it went well."""
        code, found, more = cd.errors.Code.OK, None, {}
        try:
            self.calling = True
            result = call()
            self.calling = False
            at = time.monotonic()
            if isinstance(result, np.ndarray) and result.size:
                found = float(result.flat[0]) if (result == result.flat[0]).all() else float("nan")
        except cd.errors.CollectiveError as error:
            self.calling = False
            at = time.monotonic()
            code, more = error.code, _told(error)
        except KeyboardInterrupt:  # as in a program that ends, or begins anew: it leaves
            at = time.monotonic()
            code, more = cd.errors.Code.ABORTED, {"missing": [self.here.rank], "text": "interrupted"}
            with contextlib.suppress(cd.errors.CollectiveError):
                self.leave()
        tell(
            record="outcome",
            rank=self.here.rank,
            generation=generation,
            instance=instance,
            at=at,
            code=int(code),
            value=found,
            **more,
        )
        return code is cd.errors.Code.OK

    def interrupted(self, *_: object) -> None:
        """SIGINT: felt in a collective, not between two."""
        if self.calling:
            self.calling = False
            raise KeyboardInterrupt

    # Misbehaviour

    def send_garbage(self) -> Any:
        self._raw(b"\xff" * 40)

    def send_half_a_ring(self) -> Any:
        ring = messages.Submit(self.here.generation, 1, 0, 0.0, True, ((0, 0),)).encode()
        self._raw(ring[: len(ring) // 2])

    def drop_sockets(self) -> Any:
        """Shuts all of this process's sockets to its worker, while the process lives on."""
        for descriptor in seqpackets() or streams():
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(descriptor)) as sock,
            ):  # its owner may be quicker
                sock.shutdown(socket.SHUT_RDWR)

    def never_read(self) -> Any:
        """Asks for an outcome that it has been told, again and again, and reads no answer; how often it asked."""
        sent = 0
        with socket.socket(fileno=os.dup(self.doorbell)) as sock:
            sock.setblocking(True)
            try:
                while sent < _MOST_MESSAGES:
                    sock.send(_rings[-1])
                    sent += 1
            except (BrokenPipeError, ConnectionResetError):
                pass
        return sent

    def _raw(self, message: bytes) -> None:
        with socket.socket(fileno=os.dup(self.doorbell)) as sock:
            sock.send(message)


def _vector(fill: float, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.full(count, fill)


def _options(timeout: float | None) -> cd.CommunicationOptions:
    return cd.CommunicationOptions(timeout_seconds=timeout)


def _told(error: cd.errors.CollectiveError) -> dict[str, Any]:
    return {
        "missing": sorted(member.rank for member in error.missing),
        "differing": sorted(member.rank for member in error.differing),
        "decided_by": error.decided_by,
        "text": str(error),
    }


_rings: deque[bytes] = deque(maxlen=1)  # the latest that this process has sent


def _remember_rings() -> None:
    send = seqpacket.send

    def remembering(sock: socket.socket, message: bytes, timeout: float) -> bool:
        if message[:1] == bytes((messages.MessageType.SUBMIT,)):
            _rings.append(message)
        return send(sock, message, timeout)

    seqpacket.send = remembering


def answer(rank: Rank, command: Command) -> None:
    """Carries out one command and answers it."""
    number, verb = command.pop("id"), command.pop("do")
    try:
        value = getattr(rank, verb)(**command)
        tell(answer=number, ok=True, value=value)
    except cd.errors.CollectiveError as error:
        tell(answer=number, ok=False, code=int(error.code), **_told(error))
    except Exception as error:
        tell(answer=number, ok=False, code=int(cd.errors.Code.UNKNOWN), text=f"{type(error).__name__}: {error}")


def main() -> None:
    _remember_rings()
    rank = Rank()
    signal.signal(signal.SIGINT, rank.interrupted)
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command.pop("now", False):
                answer(rank, command)
            else:
                commands.put(command)
        os._exit(0)  # the drill has ended, however it did: nobody is left behind

    threading.Thread(target=listen, daemon=True).start()
    tell(ready=os.getpid())
    while True:
        command = commands.get()
        if command["do"] == "exit":  # as a program does, in the middle of whatever it has started
            sys.exit(command["status"])
        answer(rank, command)


if __name__ == "__main__":
    main()
