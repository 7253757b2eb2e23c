"""Rank links: connections over which two ranks of different workers send messages themselves.

Each goes one way. All sockets are non-blocking and are watched by one `epoll`. A thread that waits for a message or for
room reads and writes all of them, as the leader (`leader_follower.py`); so two ranks that both send first and then
receive both complete. While no call does so, a thread of the library does, which begins with the first link: then a
send does not wait for a receiver that computes. The thread sleeps while calls come often, so that it takes no message
from them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

from collectived.calls.leader_follower import SIGNAL_CHECK_INTERVAL, LeaderFollower
from collectived.shared.rank_link import IncomingLink, LinkUser, OutgoingLink
from collectived.thread_stacks import OWN_THREADS
from collectived_proto.ipc.rank_messages import READY
from collectived_proto.ipc.spin import AdaptiveSpin

log = logging.getLogger("collectived")

_LOOK_SECONDS = 0.001
_CLOSE_TRIES = 1000  # for so long a caller that reads may take to look up
_REST_SECONDS = 0.02  # for which the thread sleeps after a call has read the links


class RankLinks:
    """Of one rank in one generation.

    Args:
        mutex: the lock of its channel.
        user: takes what comes.
        doorbell: a descriptor that is watched, too, by a caller that waits.
        on_doorbell: called when there is something to read on it.

    Attributes:
        outgoing: by receiver.
        turns: which of several threads reads.
        stepping: held while memory of calls is read or written.
    """

    def __init__(self, mutex: threading.Lock, user: LinkUser, doorbell: int, on_doorbell: Callable[[], None]) -> None:
        self.outgoing: dict[int, OutgoingLink] = {}
        self.turns = LeaderFollower(mutex)
        self._incoming: dict[int, IncomingLink] = {}  # by peer
        self._links: dict[int, OutgoingLink | IncomingLink] = {}  # by descriptor
        self._user = user
        self._doorbell = doorbell
        self._on_doorbell = on_doorbell
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # wakes those who wait for links
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._poller = select.poll()  # of callers, with the doorbell; they wait in turns
        self._poller.register(doorbell, select.POLLIN)
        self._poller.register(self._wake_fd, select.POLLIN)
        self._resumed: deque[IncomingLink] = deque()
        self.stepping = threading.RLock()
        self._watching = threading.Lock()  # over what is watched
        self._is_broken = False
        self._has_ended = False  # its thread
        self._last_led = 0.0
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def add(self, descriptor: int, peer: int, *, is_outgoing: bool) -> None:
        """Take over a connection; close it if there can be no thread for it, or no link any more. Under the mutex.

        Raises:
            ValueError: there is such a link already.
        """
        known = self.outgoing if is_outgoing else self._incoming
        sock = socket.socket(fileno=descriptor)
        if peer in known:
            sock.close()
            raise ValueError(f"a second link {'to' if is_outgoing else 'from'} rank {peer}")
        if self.is_closed or not self._start_thread():
            sock.close()
            return
        sock.setblocking(False)
        link: OutgoingLink | IncomingLink
        if is_outgoing:
            link = self.outgoing[peer] = OutgoingLink(sock, peer)
        else:
            link = self._incoming[peer] = IncomingLink(sock, peer, self._user)
            with contextlib.suppress(OSError):  # its end is seen below
                sock.send(READY)
        self._links[sock.fileno()] = link
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        self._poller.register(sock.fileno(), select.POLLIN)
        self.interrupt()

    def _start_thread(self) -> bool:
        """Whether there is a thread to read while no call does."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"{OWN_THREADS}links", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.debug("messages go by the workers: %s", error)
                return False
            self._thread = thread
        return True

    @property
    def has_incoming(self) -> bool:
        """Whether any rank has a link to this one."""
        return bool(self._incoming)

    def find_ready(self, peer: int) -> OutgoingLink | None:
        """The link to a rank, if that has taken it.

        Also if it has ended since: other messages must not go another way before it is known why.
        """
        link = self.outgoing.get(peer)
        return None if link is None or not link.is_ready else link

    def send(self, link: OutgoingLink, parts: Sequence[Any], sender: object) -> bool:
        """Send a message; whether the system has taken all of it. Else `on_sent` is called once it has."""
        try:
            sent = link.send(parts, sender)
        except OSError as error:
            link.is_refusing, link.is_reported = True, False
            self._break(link, error)
            return False
        if not sent:
            self._watch(link)
            self.interrupt()
        return sent

    def send_short(self, link: OutgoingLink, parts: list[Any]) -> bool:
        """Send a short message, of which nothing is read later. False: it has to be sent by a call that can wait."""
        try:
            sent = link.send_short(parts)
        except OSError:  # the next one says so
            return False
        if not link.is_idle:
            self._watch(link)
            self.interrupt()
        return sent

    def resume(self, peer: int) -> None:
        """The link from `peer` need not be held any longer. Under the mutex."""
        link = self._incoming.get(peer)
        if link is not None and link.is_held:
            link.is_held = False
            self._resumed.append(link)
            self.interrupt()

    def discard(self, call: object) -> None:
        """Read and write the memory of a call no more that has ended otherwise. Not under the mutex."""
        with self.stepping:
            for link in list(self._incoming.values()):
                if link.taker is call:
                    self._close(link)
            for outgoing in list(self.outgoing.values()):
                if outgoing.has(call):
                    self._close(outgoing)

    def interrupt(self) -> None:
        """Have those look up that wait for links."""
        with self._watching:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # Reading and writing, as the leader

    def wait(self, seconds: float, spin: AdaptiveSpin | None) -> None:
        """Do what can be done; if that is nothing, wait for so long at most."""
        if self.is_closed:
            self._close_descriptors()
            return
        self._last_led = monotonic()
        poller = self._poller
        found = (spin is not None and spin.poll(poller, seconds)) or poller.poll(seconds * 1000.0)
        for descriptor, events in found:
            if descriptor == self._doorbell:
                self._on_doorbell()
            else:
                self._on_event(descriptor, events)
        self._advance_resumed()
        self._last_led = monotonic()
        if self.is_closed:
            self._close_descriptors()

    def read(self) -> None:
        """Take in what is there, and go on with what is to be sent."""
        if self.is_closed:
            self._close_descriptors()
            return
        for descriptor, events in self._epoll.poll(0):
            self._on_event(descriptor, events)
        self._advance_resumed()

    def _advance_resumed(self) -> None:
        while self._resumed:
            self._advance(self._resumed.popleft())

    def _on_event(self, descriptor: int, events: int) -> None:
        link = self._links.get(descriptor)
        if isinstance(link, IncomingLink):
            self._advance(link)
        elif link is not None:
            self._advance_outgoing(link, events)
        elif descriptor == self._wake_fd:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)

    def _advance(self, link: IncomingLink) -> None:
        try:
            with self.stepping:
                link.advance()
        except BaseException as error:  # the message that was being read is lost
            self._break(link, error)
            if not isinstance(error, (OSError, ValueError)):
                raise
            return
        if link.is_over:
            self._close(link)
            return
        self._watch(link)
        if link.is_held:
            self.interrupt()  # the thread looks when it may be read
        self._user.on_advanced()

    def _advance_outgoing(self, link: OutgoingLink, events: int) -> None:
        try:
            with self.stepping:
                if events & ~select.EPOLLOUT and not link.is_over:
                    self._hear(link)
                sent = link.flush()
        except OSError as error:
            self._break(link, error)
            return
        self._watch(link)
        for sender in sent:
            if sender is not None:
                self._user.on_sent(sender)
        self._user.on_advanced()

    def _hear(self, link: OutgoingLink) -> None:
        """Take what a receiver says: that it has taken the link; then nothing but its end."""
        try:
            said = link.socket.recv(1)
        except BlockingIOError:  # it has been taken meanwhile
            return
        if said == READY and not link.is_ready:
            link.is_ready = True
        elif link.is_idle:  # it has left, or there is no room for the link: what is sent goes by the worker
            self._close(link)
        else:
            raise ConnectionResetError("the connection has ended")

    def _watch(self, link: OutgoingLink | IncomingLink) -> None:
        """Have a link watched for the events that it waits for."""
        if link.events == link.watched_events:
            return
        with self._watching, contextlib.suppress(OSError):  # it is being closed
            # Again and again: another thread may change what it waits for meanwhile, and looks at what is watched now.
            while not link.is_over and link.events != link.watched_events:
                self._change_watched(link, link.events)

    def _change_watched(self, link: OutgoingLink | IncomingLink, events: int) -> None:
        descriptor = link.socket.fileno()
        if not events:  # not for its end either, which would be reported again and again
            self._poller.unregister(descriptor)
            self._epoll.unregister(descriptor)
        elif link.watched_events:
            self._poller.modify(descriptor, events)
            self._epoll.modify(descriptor, events)
        else:
            self._poller.register(descriptor, events)
            self._epoll.register(descriptor, events)
        link.watched_events = events

    def _break(self, link: OutgoingLink | IncomingLink, error: BaseException) -> None:
        is_used = not link.is_idle  # else nothing is lost: its peer has left, most likely
        if isinstance(link, IncomingLink) and not isinstance(error, ConnectionResetError):
            is_used = True
        self._close(link)
        if is_used and not link.is_reported:
            link.is_reported = True
            why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            self._user.on_broken(link.peer, why, isinstance(link, OutgoingLink))
            self._is_broken = True
            self.interrupt()  # the thread looks for the verdict

    def _close(self, link: OutgoingLink | IncomingLink) -> None:
        with self.stepping:
            descriptor = link.socket.fileno()
            if descriptor >= 0:
                self._links.pop(descriptor, None)
                with self._watching, contextlib.suppress(OSError, ValueError, KeyError):  # it is not watched
                    link.is_over = True  # first: it is not watched again
                    self._poller.unregister(descriptor)
                    self._epoll.unregister(descriptor)
                link.close()

    # The thread

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for threads of the caller's
        while not self._closing.is_set():
            if self._rest():
                continue
            try:
                has_come = self._epoll.poll()
            except (OSError, ValueError):  # it is closed
                return
            if has_come and not self.turns.lead(self._read_guarded):
                self._closing.wait(_REST_SECONDS)

    def _look_guarded(self) -> None:
        try:
            self._is_broken = self._user.look()
        except Exception as error:
            self._user.on_failure(error)

    def _read_guarded(self) -> None:
        try:
            self.read()
        except Exception as error:
            self._user.on_failure(error)

    def _rest(self) -> bool:
        """Sleep while callers read the links; whether they have."""
        rest = self._last_led + _REST_SECONDS - monotonic()
        if self._is_broken or any(link.is_held for link in list(self._incoming.values())):
            self._look_guarded()
            rest = _REST_SECONDS
        return rest > 0 and not self._closing.wait(rest)

    @property
    def is_sending(self) -> bool:
        """Whether there are messages that the system has not taken yet."""
        return any(not (link.is_idle or link.is_over) for link in list(self.outgoing.values()))

    def await_sent(self, seconds: float) -> None:
        """Wait until the system has taken all messages, for so long at most."""
        end = monotonic() + seconds
        while self.is_sending and monotonic() < end:
            if not self.turns.lead(partial(self.wait, SIGNAL_CHECK_INTERVAL, None)):
                time.sleep(_LOOK_SECONDS)

    @property
    def is_closed(self) -> bool:
        """Whether nothing comes or goes here any more."""
        return self._closing.is_set()

    def close(self) -> None:
        """Let go of all links; messages that were sent stay on their way. Not under the mutex."""
        self._closing.set()
        self.interrupt()
        thread = self._thread
        while thread is not None and thread is not threading.current_thread() and thread.is_alive():
            self.interrupt()  # again: a caller may have taken that
            thread.join(_LOOK_SECONDS)
        self._has_ended = True
        for link in list(self._links.values()):
            self._close(link)
        for _ in range(_CLOSE_TRIES):  # a leader that runs a callback does that when it looks up
            if self._wake_fd < 0 or self.turns.lead(self._close_descriptors):
                break
            self.interrupt()
            time.sleep(_LOOK_SECONDS)

    def _close_descriptors(self) -> None:
        if not self._has_ended:  # else it would sleep on in a descriptor that is closed
            return
        with self._watching:
            descriptor, self._wake_fd = self._wake_fd, -1
            self._epoll.close()
        if descriptor >= 0:
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked child: the connections are its parent's."""
        self._closing = threading.Event()  # whose lock no thread of the parent's holds
        self._closing.set()
        for link in self._links.values():
            link.socket.close()
        self._epoll.close()
        descriptor, self._wake_fd = self._wake_fd, -1
        if descriptor >= 0:
            os.close(descriptor)
