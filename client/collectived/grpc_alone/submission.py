"""One `Submit` from its header to its last result, in a thread of the library's.

As in `rpc_thread`, nothing of gRPC is called in a thread of the caller's, where Ctrl-C may come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectived.connection.rpc_thread import fork_lock
from collectived_proto.v1 import worker_pb2

CHUNK_BYTES = 1 << 20  # bytes of a data message
_MAX_JOINED_LEAVES = 1024  # leaves joined in one

Bytes = NDArray[np.uint8]


class Submission:
    """Args:
    start: begins the RPC with these requests.
    heard: takes a reply. ended: is called once, after the last, with what was wrong or None.
    """

    def __init__(
        self,
        start: Callable[[Iterator[worker_pb2.SubmitRequest]], Any],
        header: worker_pb2.SubmitHeader,
        parts: Sequence[Bytes],
        heard: Callable[[worker_pb2.SubmitReply], None],
        ended: Callable[[Exception | None], None],
    ) -> None:
        self._start = start
        self._requests = requests(header, parts)
        self._on_reply = heard
        self._on_end = ended

    def begin(self) -> None:
        try:
            threading.Thread(target=self._run, name="collectived-submit", daemon=True).start()
        except RuntimeError as error:  # the interpreter is ending, and starts no more threads
            self._on_end(error)

    def _run(self) -> None:
        last: Exception | None = None
        try:
            with fork_lock:
                call = self._start(self._requests)
            try:
                for reply in call:
                    self._on_reply(reply)
            finally:
                call.cancel()  # which changes nothing where it is over
        except Exception as error:
            last = error
            error.__traceback__ = None  # it is the RPC itself, and is to end in this thread: no cycle, no cause
        self._on_end(last)


def requests(header: worker_pb2.SubmitHeader, parts: Sequence[Bytes]) -> Iterator[worker_pb2.SubmitRequest]:
    """The header, then the bytes of all leaves, one after another, in chunks."""
    yield worker_pb2.SubmitRequest(header=header)
    waiting: list[memoryview] = []
    size = 0
    for part in parts:
        data = part.data
        while data:
            piece = data[: CHUNK_BYTES - size]
            waiting.append(piece)
            size += len(piece)
            data = data[len(piece) :]
            if size == CHUNK_BYTES or len(waiting) == _MAX_JOINED_LEAVES:
                yield worker_pb2.SubmitRequest(data=b"".join(waiting))
                waiting, size = [], 0
    if waiting:
        yield worker_pb2.SubmitRequest(data=b"".join(waiting))
