"""Answers the worker's question where the threads of this process are, over a socket of its own.

No signal is involved, which would kill processes that have no handler and interrupt system calls of the caller's. The
one thread that a session with shared memory has waits in the kernel, costs nothing, and needs the GIL to answer: where
C code keeps that, the worker gets no answer and says so.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading

from collectived.errors import UnavailableError
from collectived.shared import seqpacket
from collectived.thread_stacks import OWN_THREADS, describe_threads
from collectived_proto.ipc import messages

log = logging.getLogger("collectived")

_ALL_SIGNALS = signal.valid_signals()
_CONNECT_TIMEOUT = 5.0  # seconds; its worker has answered a moment ago


class StackAnswers:
    """Of one session. `token` admits its socket at `path`. Without it, or without room, there are no answers."""

    def __init__(self, path: str, token: bytes, worker: str) -> None:
        self._socket: socket.socket | None = None
        if not token:  # of a worker that does not ask
            return
        try:
            self._socket = seqpacket.connect(path, token, _CONNECT_TIMEOUT, worker)
            self._socket.setblocking(True)
            arguments = (self._socket, threading.get_ident())
            threading.Thread(target=_answer, args=arguments, name=f"{OWN_THREADS}stacks", daemon=True).start()
        except (UnavailableError, RuntimeError) as error:  # no descriptor, or no thread
            log.debug("%s cannot ask what this process does: %s", worker, error)
            if self._socket is not None:
                self._socket.close()

    def close(self) -> None:
        """Ends the thread, which closes the socket."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def invalidate_after_fork(self) -> None:
        """In a forked child, which has no such thread."""
        if self._socket is not None:
            self._socket.close()


def _answer(sock: socket.socket, first: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _ALL_SIGNALS)  # they are for threads of the caller's
    with sock, contextlib.suppress(OSError):
        while sock.recv(messages.MAX_STACK):
            sock.send(messages.encode_bare(messages.MessageType.STACK, describe_threads(first)))
