"""The connection server: one thread that accepts and dials connections, until their handshakes are over.

It listens on the worker's TCP port for links of other workers and on a Unix socket for session sockets and doorbells,
and dials links to others, or takes up one that has served before (`pool.py`). Each handshake is a generator that yields
the poll events it waits for and ends with what it hands on; a slow or silent guest therefore holds no thread, and after
`HANDSHAKE_SECONDS` it is shown out. Where too many wait, the oldest of those that came in the same way is closed: one
that is expected needs milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from hashlib import sha256
from itertools import islice, takewhile
from typing import NamedTuple

from collectived_proto.errors import FailedPreconditionError
from collectived_proto.ipc import messages
from collectived_proto.version import negotiate_version
from collectived_runtime.limits.passed_descriptors import create_unix_socket
from collectived_runtime.limits.rejections import Limit, MessageSource
from collectived_runtime.transport import handshake
from collectived_runtime.transport import hello as hello_
from collectived_runtime.transport.dial import DialRequest
from collectived_runtime.transport.handshake import TlsContexts
from collectived_runtime.transport.handshakes import Handshake, PendingHandshake, PendingHandshakes
from collectived_runtime.transport.hello import MAX_EARLY_LINKS, HandshakeCut, HelloRefused, NoRoom
from collectived_runtime.transport.link import Link, Origin, Stream
from collectived_runtime.transport.listener import (
    AcceptLimits,
    AcceptListener,
    bind,
    describe_peer,
    format_address,
    get_peer_credentials,
    listen_for_links,
)
from collectived_runtime.transport.pool import LinkPool
from collectived_runtime.transport.resolver import Resolver

log = logging.getLogger("collectived.connections")

HANDSHAKE_SECONDS = 10.0
TOKEN_SECONDS = 10.0
DIAL_PAUSE_SECONDS = 0.1
REUSE_ANSWER_SECONDS = 1.0  # in which a kept connection answers a hello, or is taken for dead
LINK_BUFFER_BYTES = 4 << 20

LinkKey = tuple[int, int, int, int]  # group key, generation, peer, channel


class _Token(NamedTuple):
    """A token that admits one connection, once."""

    deadline: float
    on_connection: Callable[[socket.socket], None]
    uid: int | None


class ConnectionServer:
    """See the module. Methods may be called from any thread.

    Args:
        task: this worker's number; links for others are refused.
        secret: the job's secret; empty: no link is let in or dialled until `set_secret` gives one.
        door: path of the Unix socket for clients; a file that a killed worker left there is taken over.
        link_address: (host, port) to listen on for links; port 0 is chosen by the system.
        contexts: of TLS, which links then speak below the hello; None: they speak it in plain text.

    Raises:
        OSError: an address is in use, or is not one of this host.
    """

    def __init__(
        self,
        task: int,
        secret: str,
        door: str,
        link_address: tuple[str, int],
        limits: AcceptLimits | None = None,
        contexts: TlsContexts | None = None,
    ) -> None:
        limits = limits or AcceptLimits()
        self._rejections, self._login_throttle = limits.rejections, limits.login_throttle
        self._task = task
        self._contexts = contexts
        self._secret = secret
        self.unix_path = door
        try:
            self._link_listener = listen_for_links(*link_address)
        except OSError as error:
            where = format_address(*link_address)
            raise OSError(error.errno, f"cannot listen for links at {where}: {error.strerror}") from None
        self._link_listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LINK_BUFFER_BYTES)
        self._unix_listener = create_unix_socket(socket.SOCK_SEQPACKET)
        try:
            bind(self._unix_listener, door)
            os.chmod(door, 0o600)  # independent of the umask; its worker sets the other users
            self._unix_listener.listen(128)
        except OSError:
            self._link_listener.close()
            self._unix_listener.close()
            raise
        for listener in (self._link_listener, self._unix_listener):
            listener.setblocking(False)
        self.link_port: int = self._link_listener.getsockname()[1]
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._callbacks: deque[Callable[[], None]] = deque()
        self._close_lock = threading.Lock()  # no thread writes to a descriptor that has been closed, and perhaps reused
        self._tokens: dict[bytes, _Token] = {}  # by digest: the time of a search reveals nothing about tokens
        self._expected: dict[LinkKey, Callable[[Link], None]] = {}
        self._early_links: dict[LinkKey, tuple[float, Link]] = {}
        self._live_generations: set[tuple[int, int]] = set()  # by key: those for which a group loop expects links
        self._dial_requests: list[DialRequest] = []
        self._resolver = Resolver()
        self._on_probe_link: Callable[[Link], None] = Link.close
        self._listeners: dict[int, AcceptListener[PendingHandshake]] = {
            self._link_listener.fileno(): AcceptListener(
                self._link_listener,
                MessageSource.HANDSHAKE,
                limits,
                no_room=b"" if contexts else hello_.encode_no_room(NoRoom.DESCRIPTORS),
            ),
            self._unix_listener.fileno(): AcceptListener(self._unix_listener, MessageSource.SOCKET, limits),
        }
        self._dialling: dict[int, PendingHandshake] = {}  # those that this worker dials
        self._poll = select.epoll()
        self._handshakes = PendingHandshakes(self._poll, self._on_handshake_error)  # all of them
        self._pool = LinkPool(self._handshakes, contexts, limits.max_descriptors, self._answer_hello)
        self._stopping = False
        self.links_opened = {"dialled": 0, "accepted": 0, "kept": 0}  # links, by how they came about
        self._thread = threading.Thread(target=self._run, name="reception", daemon=True)
        self._thread.start()

    # Called by other threads

    def admit(self, token: bytes, arrived: Callable[[socket.socket], None], uid: int | None = None) -> None:
        """Admit one Unix connection that shows `token` within `TOKEN_SECONDS`; `arrived` runs in this thread.

        Args:
            uid: of the user that got the token, and that alone may show it; None: not known.
        """
        self._call_soon_threadsafe(
            lambda: self._tokens.__setitem__(
                sha256(token).digest(), _Token(time.monotonic() + TOKEN_SECONDS, arrived, uid)
            )
        )

    def expect_links(self, keys: Sequence[LinkKey], arrived: Callable[[Link], None]) -> None:
        """Hands the links that peers dial for these keys to `arrived`, at once those that are here already.

        From here on links of that generation may come before they are expected, and wait until `discard_generation`.

        Args:
            keys: of one generation.
        """

        def enter() -> None:
            generation = keys[0][:2]
            if generation not in self._live_generations:
                self._live_generations.add(generation)
                self._early_links |= {
                    k: (math.inf, link) for k, (_, link) in self._early_links.items() if k[:2] == generation
                }
            self._expected |= dict.fromkeys((key for key in keys if key not in self._early_links), arrived)
            for early in [self._early_links.pop(key) for key in keys if key in self._early_links]:
                arrived(early[1])

        if keys:
            self._call_soon_threadsafe(enter)

    def discard_generation(self, key: int, generation: int) -> None:
        """Links of this generation are no longer wanted."""

        def enter() -> None:
            self._live_generations.discard((key, generation))
            for known in [k for k in self._expected if k[:2] == (key, generation)]:
                del self._expected[known]
            for known in [k for k in self._early_links if k[:2] == (key, generation)]:
                self._early_links.pop(known)[1].close()
            self._dial_requests = [
                c for c in self._dial_requests if (c.hello.key, c.hello.generation) != (key, generation)
            ]

        self._call_soon_threadsafe(enter)

    def release_link(self, link: Link, farewell: bytes) -> None:
        """Keep the connection of a link, on which `farewell` has been said and frames are whole, for another link.

        The peer is to say the same farewell. Where nothing comes of it the link is closed.
        """
        with self._close_lock:
            if not self._stopping:
                self._callbacks.append(lambda: self._pool.release(link, farewell))
                os.eventfd_write(self._wake_fd, 1)
                return
        link.close()

    def dial(self, call: DialRequest) -> None:
        def resolved(found: tuple[str, int] | str) -> None:
            def enter() -> None:
                if isinstance(found, str):
                    call.fail(found)
                else:
                    call.resolved_address = found
                    self._dial_requests.append(call)

            self._call_soon_threadsafe(enter)

        self._resolver.resolve(call.address, resolved)

    def set_secret(self, secret: str) -> None:
        """Prove links with this secret from now on."""
        self._secret = secret

    def set_probe_handler(self, arrived: Callable[[Link], None]) -> None:
        """Hands links that a peer wants to measure to `arrived`, in this thread; without this they are closed."""

        def enter() -> None:
            self._on_probe_link = arrived

        self._call_soon_threadsafe(enter)

    def close(self) -> None:
        """End the thread and close what it holds; connections that were handed on stay."""
        with self._close_lock:
            if self._stopping:
                return
            self._stopping = True
            os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        self._resolver.close()
        os.close(self._wake_fd)

    def _call_soon_threadsafe(self, what: Callable[[], None]) -> None:
        self._callbacks.append(what)
        with self._close_lock:
            if not self._stopping:
                os.eventfd_write(self._wake_fd, 1)

    # The thread

    def _run(self) -> None:
        for listener in (self._link_listener.fileno(), self._unix_listener.fileno(), self._wake_fd):
            self._poll.register(listener, select.POLLIN)
        while not self._stopping:
            for descriptor, _ in self._poll.poll(self._poll_timeout()):
                if descriptor == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                elif descriptor in self._listeners:
                    _run_guarded(partial(self._accept, self._listeners[descriptor]))
                else:
                    self._handshakes.step(descriptor)
            while self._callbacks:
                _run_guarded(self._callbacks.popleft())
            self._start_due_dials()
            _run_guarded(self._close_expired)
        while self._callbacks:
            _run_guarded(self._callbacks.popleft())
        self._handshakes.close()
        for _, link in self._early_links.values():
            link.close()
        self._link_listener.close()
        self._unix_listener.close()
        self._poll.close()
        with contextlib.suppress(OSError):
            os.unlink(self.unix_path)

    def _poll_timeout(self) -> float | None:
        """Return the seconds until something expires."""
        now = time.monotonic()
        times = [guest.deadline for guest in self._dialling.values()] + self._pool.deadlines
        times += [call.not_before for call in self._dial_requests]
        times += [token.deadline for token in islice(self._tokens.values(), 1)]  # the oldest is the first to go
        times += [expires for expires, _ in self._early_links.values()]
        times += [at for one in self._listeners.values() for at in one.deadlines(now)]
        first = min(times, default=math.inf)
        return None if first == math.inf else max(0.0, first - now + 0.001)

    def _close_expired(self) -> None:
        now = time.monotonic()
        for one in self._listeners.values():
            for guest in one.collect_expired(now):
                self._handshakes.abort(guest)
            if one.try_reopen(now):
                self._poll.modify(one.listener.fileno(), select.POLLIN)
        for guest in [guest for guest in self._dialling.values() if guest.deadline <= now]:
            self._handshakes.abort(guest)
        self._pool.close_expired(now)
        for digest in list(takewhile(lambda digest: self._tokens[digest].deadline <= now, self._tokens)):
            del self._tokens[digest]
        for key in [key for key, (expires, _) in self._early_links.items() if expires <= now]:
            self._early_links.pop(key)[1].close()

    def _accept(self, entrance: AcceptListener[PendingHandshake]) -> None:
        came = entrance.accept(self._handshakes.abort)
        if entrance.paused_until:
            self._poll.modify(entrance.listener.fileno(), 0)
        if came is not None:
            greet = self._accept_link if entrance.listener is self._link_listener else self._accept_client
            self._handshakes.start(came[0], greet(*came), HANDSHAKE_SECONDS, entrance.pending, describe_peer(came[0]))

    def _on_handshake_error(self, guest: PendingHandshake, error: Exception) -> None:
        for one in self._listeners.values():
            if one.pending is guest.queue and not isinstance(error, OSError):
                is_local = guest.connection.family == socket.AF_UNIX
                self._rejections.count_malformed(
                    one.source, get_peer_credentials(guest.connection)[1] if is_local else None
                )
        known = isinstance(error, (OSError, HelloRefused, messages.MalformedMessage))
        told = known and guest.queue is self._dialling  # to its caller
        level = logging.DEBUG if told else logging.WARNING
        log.log(level, "the connection %s was refused: %s", guest.peer, error, exc_info=None if known else error)

    def _accept_client(self, connection: socket.socket, _: str) -> Handshake:
        said = None
        while said is None:
            yield select.POLLIN
            with contextlib.suppress(BlockingIOError):  # the event was of another guest, which had the same descriptor
                said = connection.recv(256)
        token, versions = messages.parse_hello(said)
        known = self._tokens.pop(sha256(token).digest(), None)
        if known is None or known.deadline <= time.monotonic():
            raise HelloRefused("a client showed a token that is unknown, used or older than 10 s")
        if known.uid is not None and known.uid != (uid := get_peer_credentials(connection)[1]):
            raise HelloRefused(f"uid {uid} showed a token that was given to another user")
        try:
            negotiate_version(versions, "the client", "this worker")
        except FailedPreconditionError as error:
            connection.send(messages.encode_refused(error.code, str(error)))
            raise HelloRefused(str(error)) from None
        self._handshakes.discard(self._handshakes.get(connection))
        known.on_connection(connection)

    def _accept_link(self, connection: socket.socket, host: str) -> Handshake:
        connection = yield from self._secure(connection)
        said = yield from handshake.read(connection, hello_.HELLO_BYTES)
        yield from self._answer_hello(connection, host, said)

    def _answer_hello(self, connection: socket.socket, host: str, said: bytes) -> Handshake:
        """Answer a hello, and hand the link to the group loop that expects it."""
        try:
            hello = hello_.parse(said)
        except HelloRefused as refused:
            yield from handshake.write(connection, refused.answer)
            raise
        guest = self._handshakes.get(connection)
        guest.peer = f"{guest.peer} (which calls itself worker {hello.dialler})"
        if hello.acceptor != self._task:
            raise HelloRefused(f"it dialled worker {hello.acceptor}, and this is worker {self._task}")
        key = (hello.key, hello.generation, hello.dialler, hello.channel)
        if not hello.is_probe and key not in self._expected and len(self._early_links) >= MAX_EARLY_LINKS:
            log.warning("the link %s was refused: %d unexpected links wait already", guest.peer, MAX_EARLY_LINKS)
            self._rejections.count_limit(Limit.LINKS)
            yield from handshake.write(connection, hello_.encode_no_room(NoRoom.EARLY_LINKS))
            self._handshakes.discard(guest)
            connection.close()
            return
        nonce = os.urandom(hello_.NONCE_BYTES)
        yield from handshake.write(connection, nonce + hello_.proof(self._secret, "accept", said, nonce))
        shown = yield from handshake.read(connection, hello_.PROOF_BYTES)
        try:
            hello_.verify_proof(self._secret, "dial", said, nonce, shown)
        except HelloRefused:
            self._login_throttle.record_failure(host)
            if self._login_throttle.has_failed_too_often(host):
                self._rejections.count_limit(Limit.LOGINS)
            raise
        stream = handshake.make_stream(connection)
        self._handshakes.discard(guest)
        self.links_opened["kept" if guest.queue is self._pool.resuming else "accepted"] += 1
        link = Link(hello.dialler, hello.channel, stream, Origin(connection, None))
        arrived = self._on_probe_link if hello.is_probe else self._expected.pop(key, None)
        if arrived is not None:
            arrived(link)
        else:
            expires = math.inf if key[:2] in self._live_generations else time.monotonic() + HANDSHAKE_SECONDS
            if older := self._early_links.get(key):
                older[1].close()
            self._early_links[key] = (expires, link)

    def _secure(self, connection: socket.socket, host: str | None = None) -> Generator[int, None, socket.socket]:
        """The connection, over TLS where links speak that. `host`: that was dialled; None: we were."""
        if self._contexts is None:
            return connection
        guest = self._handshakes.get(connection)
        guest.connection = secured = handshake.wrap_tls(connection, self._contexts, host)
        yield from handshake.do_tls_handshake(secured)
        return secured

    def _start_due_dials(self) -> None:
        now = time.monotonic()
        due = [call for call in self._dial_requests if call.not_before <= now]
        self._dial_requests = [call for call in self._dial_requests if call.not_before > now]
        for call in due:
            try:
                self._start_dial(call, now)
            except OSError as error:  # out of descriptors: it may fare better next time
                _run_guarded(partial(self._retry_dial, call, error))
            except Exception as error:  # the caller must not wait for the link
                log.exception("a defect of collectived: worker %d is not dialled", call.hello.acceptor)
                _run_guarded(partial(call.fail, f"a defect of collectived: {error}"))

    def _start_dial(self, call: DialRequest, now: float) -> None:
        assert call.resolved_address is not None
        kept = self._pool.acquire(call.peer_address) if call.incarnation and not call.skip_pool else None
        name = f"to worker {call.hello.acceptor} at {format_address(*call.address)}"
        if kept is not None:
            self._handshakes.start(kept, self._reuse_connection(kept, call), REUSE_ANSWER_SECONDS, self._dialling, name)
            return
        connection = socket.socket(socket.AF_INET6 if ":" in call.resolved_address[0] else socket.AF_INET)
        dialling = self._dial(connection, call, call.resolved_address)
        self._handshakes.start(connection, dialling, max(0.1, call.deadline - now), self._dialling, name)

    def _reuse_connection(self, connection: socket.socket, call: DialRequest) -> Handshake:
        """Say hello on a kept connection, and hands the link on; where nothing comes of it there, dials."""
        try:
            stream = yield from handshake.exchange_hello(connection, call.hello, self._secret)
        except (HelloRefused, OSError, GeneratorExit) as error:
            log.debug("a kept connection to worker %d is of no use: %s", call.hello.acceptor, error)
            call.skip_pool = True
            self._dial_requests.append(call)
            connection.close()
            return
        self._hand_over(connection, call, stream, "kept")

    def _dial(self, connection: socket.socket, call: DialRequest, found: tuple[str, int]) -> Handshake:
        """Dials, proves, hands the link on; tries again after a pause, until the request has ended."""
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINK_BUFFER_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LINK_BUFFER_BYTES)
            status = connection.connect_ex(found)
            if status == errno.EINPROGRESS:
                yield select.POLLOUT
                status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if status:
                raise OSError(status, os.strerror(status))
            connection = yield from self._secure(connection, call.address[0])
            stream = yield from handshake.exchange_hello(connection, call.hello, self._secret)
        except (HandshakeCut, OSError) as error:  # the peer may have no room just now
            self._retry_dial(call, error)
            raise
        except HelloRefused as error:
            call.fail(error)
            raise
        except GeneratorExit:
            call.fail(TimeoutError("it does not answer"))
            raise
        except Exception as error:  # any error: the caller must not wait for the link
            call.fail(error)
            raise
        self._hand_over(connection, call, stream, "dialled")

    def _hand_over(self, connection: socket.socket, call: DialRequest, stream: Stream, how: str) -> None:
        self._handshakes.discard(self._handshakes.get(connection))
        self.links_opened[how] += 1
        call.on_link(Link(call.hello.acceptor, call.hello.channel, stream, Origin(connection, call.peer_address)))

    def _retry_dial(self, call: DialRequest, error: Exception) -> None:
        now = time.monotonic()
        if now < call.deadline:
            call.not_before = now + DIAL_PAUSE_SECONDS
            self._dial_requests.append(call)
        else:
            call.fail(error)


def _run_guarded(what: Callable[[], None]) -> None:
    """Call a function for a caller or guest. Its errors are logged.

    They must not end this thread: no further connection would be accepted or dialled.
    """
    try:
        what()
    except Exception:
        log.exception("a defect of collectived: the connection server goes on without what has failed")
