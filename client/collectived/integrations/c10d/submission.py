"""Submission of operations of a process group: the group of the service, options, and how a call becomes a Work."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist

from collectived import operations
from collectived.eager_send import begin_send
from collectived.group import Group
from collectived.integrations.c10d.errors import translate
from collectived.integrations.c10d.lifetime import LOSES_WORKS, keep
from collectived.integrations.c10d.meeting import agree_on_name
from collectived.integrations.c10d.receive import LazyReceive, ReceiveWork
from collectived.integrations.c10d.tensors import Leaf
from collectived.integrations.c10d.work import CompletedWork, FailedWork, Finish, PendingWork, Start
from collectived.session import Session, connect
from collectived.work import Work
from collectived_proto.errors import CollectiveError
from collectived_proto.options import CommunicationOptions

AnyWork = CompletedWork | FailedWork | PendingWork
SHORT_BYTES = 64 << 10  # of a send that ends at once, and of a receive that is not posted
CLOSE_GRACE = 5.0  # seconds for operations that are still open when their process group is destroyed


class SharedSession:
    """The session of this process, for as long as a process group uses it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._users = 0
        self._session: Session | None = None

    def acquire(self) -> Session:
        with self._lock:
            if self._session is None or self._pid != os.getpid():
                self._session, self._pid, self._users = connect(), os.getpid(), 0
            self._users += 1
            return self._session

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._session is not None:
                session, self._session = self._session, None
                session.close()


_shared_session = SharedSession()


class Submission:
    """One rank's hold on the group of the service that carries a process group; it holds the session too.

    Attributes:
        timeout: of operations that give none.
        sequence: how many operations were started.
    """

    def __init__(self, timeout: timedelta, join: Callable[[Session, CommunicationOptions], Group | None]) -> None:
        """`join` gives the group; None: this rank is not in it.

        Raises:
            DistBackendError: no worker is there, or the group was not complete in time.
        """
        self.timeout = timeout
        self.sequence = 0
        self._merged: dict[timedelta, CommunicationOptions] = {}
        self._defaults: CommunicationOptions | None = self.merge_timeout(None)  # of the group, where these are they
        self._group: Group | None = None
        self._why_closed = "this rank is in no part of the process group that was split"
        self._open: WeakSet[PendingWork] = WeakSet()  # may have ended since
        self._lazy = LazyReceive()
        self._receivers: set[int] = set()  # threads; where there are several, each receive is posted in its turn
        self._waiting_send: Work[None] | None = None  # a short one that did not end at once
        try:
            session = _shared_session.acquire()
            try:
                self._group = join(session, self.merge_timeout(None))
                if self._group is not None:
                    if self._group.options != self._defaults:
                        self._defaults = None
                    self._group.lends_inputs = True  # c10d forbids touching them before an operation has ended
            finally:
                if self._group is None:
                    _shared_session.release()
        except CollectiveError as error:
            raise translate(error) from error

    @classmethod
    def join(cls, options: Any) -> Submission:
        """Join the group that c10d's options for the creator of a process group name."""
        return cls(
            options.timeout,
            lambda session, defaults: session.join(
                agree_on_name(options.store, options.group_id),
                options.group_size,
                rank=options.group_rank,
                device=_own_device(session, options),
                options=defaults,
                timeout=options.timeout,
            ),
        )

    def split(self, color: int | None, key: int, timeout: timedelta | None) -> Submission:
        """That of a part of this group; all ranks call it. It is not open where `color` is None."""
        return Submission(timeout or self.timeout, lambda _, __: self.group.split(color, key))

    @property
    def group(self) -> Group:
        if self._group is None:
            raise dist.DistBackendError(f"{self._why_closed}: call init_process_group or new_group again")
        return self._group

    @property
    def is_open(self) -> bool:
        return self._group is not None

    def run(self, starts: Sequence[Start], finish: Finish | None, result: Any, opts: Any = None) -> AnyWork:
        """Start collectives that together are one operation; wait for them where c10d's caller would at once.

        Args:
            finish: what is to be done with their results. result: what the operation's Work gives.
            opts: c10d's; without any, the caller does not wait.
        """
        work = self._run(starts, finish, result, opts)
        if LOSES_WORKS:
            keep(work)
        return work

    def send(self, value: Leaf, to: int, tag: int, result: Any) -> AnyWork:
        """Send a flat value; the Work gives `result`. A short one ends at once, unless one before it waits for room."""
        if not self._is_short(value) or self._is_send_waiting():
            return self.run([partial(self.group.send, value, to, tag)], None, result)
        self.sequence += 1
        work: AnyWork
        try:
            self._waiting_send = begin_send(self.group, value, to, tag)
        except CollectiveError as error:
            work = FailedWork(translate(error), result)
        else:
            work = CompletedWork(result)
            if self._waiting_send is not None:
                self._lazy.post()  # its peer may wait for room, too
                work = PendingWork([self._waiting_send], None, result)
                self._open.add(work)
        if LOSES_WORKS:
            keep(work)
        return work

    def receive(self, target: Leaf, source: int | None, tag: int, finish: Finish | None, result: Any) -> AnyWork:
        """Receive into `target`, from any rank without a source; the Work gives `result`."""
        start = partial(self.group.recv, source, tag, out=target)
        thread = threading.get_ident()
        self._receivers.add(thread)
        if source is None or not self._is_short(target) or len(self._receivers) > 1:
            return self.run([start], finish, result)
        operations.recv(source, tag, self.group.size)  # says what is wrong with them
        self.sequence += 1
        work = ReceiveWork(self._lazy, self.group, start, source, finish, result)
        self._lazy.keep(work)
        self._open.add(work)
        if LOSES_WORKS:
            keep(work)
        return work

    def _is_short(self, leaf: Leaf) -> bool:
        """Whether it may go without a Work of the group: it is on the host, and its timeout is that of the group."""
        has_defaults = self._defaults is not None and self.merge_timeout(None) is self._defaults
        return has_defaults and type(leaf) is np.ndarray and leaf.nbytes <= SHORT_BYTES

    def _is_send_waiting(self) -> bool:
        try:
            return self._waiting_send is not None and not self._waiting_send.done()
        except CollectiveError:  # the long way says so
            return True

    def _run(self, starts: Sequence[Start], finish: Finish | None, result: Any, opts: Any) -> AnyWork:
        self._lazy.post()
        self.sequence += 1
        merged = self.merge_timeout(getattr(opts, "timeout", None))
        options = None if merged is self._defaults else merged  # a call without options of its own is quicker
        is_async = getattr(opts, "asyncOp", True)
        try:
            if is_async:
                work = PendingWork([start(options=options, async_op=True) for start in starts], finish, result)
                self._open.add(work)
                return work
            results = [start(options=options) for start in starts]
        except CollectiveError as error:
            failure = translate(error)
            if is_async:
                return FailedWork(failure, result)
            raise failure from error
        if finish is not None:
            finish(results)
        return CompletedWork(result)

    def merge_timeout(self, given: timedelta | None) -> CommunicationOptions:
        """Options of one operation. c10d's options that were not set have a timeout of -1 ms."""
        limit = given if given is not None and given > timedelta(0) else self.timeout
        found = self._merged.get(limit)
        if found is None:
            found = self._merged[limit] = CommunicationOptions(timeout_seconds=limit.total_seconds() or None)
        return found

    def close(self, reason: str) -> None:
        """Leave the group; a second call does no harm. Errors have been raised to the callers.

        Receives that are still posted are withdrawn. Other open works get some seconds to end;
        then they are aborted on all ranks, with that reason, because their other ranks may never come.
        """
        if self.is_open:
            self._lazy.post()
        works = [work for work in self._open if not work.has_ended()] if self.is_open else []
        for work in works:
            work.cancel()
        end = monotonic() + CLOSE_GRACE
        for work in works:
            with contextlib.suppress(Exception):
                work.wait(timedelta(seconds=max(0.001, end - monotonic())))
        if any(not work.has_ended() for work in works):
            self.abort(reason)
        self._leave("this process group was destroyed")

    def abort(self, reason: str) -> None:
        """End what is in flight, and every later operation, on all ranks, and leave the group; again is no harm."""
        group = self._group
        if group is not None:
            self._lazy.post()
            with contextlib.suppress(CollectiveError):  # it is over already
                group.abort(reason)
            self._leave(reason)

    def _leave(self, why: str) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        self._why_closed = why
        self._open.clear()
        try:
            with contextlib.suppress(CollectiveError):
                group.leave()
        finally:
            _shared_session.release()


def _own_device(session: Session, options: Any) -> torch.device | None:
    """The GPU that this process has chosen, where its worker offers GPUs; None: what the worker chooses.

    Before PyTorch 2.14 c10d does not say which GPU a process group is bound to: there CUDA must be in use already.
    """
    offers = any("GPU" in device for device in session.devices)
    if not offers:
        return None
    bound = getattr(getattr(options, "process_group", None), "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        return torch.device(bound)
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.device("cuda", torch.cuda.current_device())
