"""The reception: one thread where connections come in and go out, until they are who they should be.

It listens on the worker's TCP port for links of other workers and on a Unix socket for session sockets and doorbells,
and dials links to others, or takes up one that has served before (`kept.py`). Each handshake is a generator that yields
the poll events it waits for and ends with what it hands on; a slow or silent guest therefore holds no thread, and after
`HANDSHAKE_SECONDS` it is shown out. Where too many wait, the oldest of those that came in the same way has to go: who
is expected needs milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import islice, takewhile
from typing import NamedTuple

from collectived_proto.errors import FailedPreconditionError
from collectived_proto.local import wire
from collectived_proto.protocol import agree
from collectived_runtime.limits.descriptors import WANTED
from collectived_runtime.limits.logins import Logins
from collectived_runtime.limits.refusals import Limit, Refusals, Where
from collectived_runtime.transport import handshake
from collectived_runtime.transport import hello as hello_
from collectived_runtime.transport.entrance import Entrance, House, bind
from collectived_runtime.transport.guests import Guest, Guests, Handshake
from collectived_runtime.transport.handshake import Contexts
from collectived_runtime.transport.hello import Hello, Refused
from collectived_runtime.transport.kept import Kept
from collectived_runtime.transport.link import Link, Stream, Way, Whom
from collectived_runtime.transport.resolver import Resolver

log = logging.getLogger("collectived.reception")

HANDSHAKE_SECONDS = 10.0
TOKEN_SECONDS = 10.0
DIAL_SECONDS = 5.0
DIAL_PAUSE_SECONDS = 0.1
ANSWER_SECONDS = 1.0  # in which a kept connection answers a hello, or is taken for dead
LINK_BUFFER_BYTES = 4 << 20
MOST_GUESTS = 1024
MOST_EARLY = 4096  # links that have come before anybody expects them

_CREDENTIALS = struct.Struct("3i")

LinkKey = tuple[int, int, int, int]  # group key, generation, peer, channel


class _Token(NamedTuple):
    """What admits one connection, once."""

    expires: float
    arrived: Callable[[socket.socket], None]
    uid: int | None


@dataclass(slots=True)
class Call:
    """A link to be dialled. Exactly one of the two is called, in the reception's thread.

    `incarnation` is the peer's; "": a connection that was kept will not do.
    """

    address: tuple[str, int]
    hello: Hello
    arrived: Callable[[Link], None]
    failed: Callable[[int, str], None]  # peer, why
    give_up: float = field(default_factory=lambda: time.monotonic() + DIAL_SECONDS)
    not_before: float = 0.0
    found: tuple[str, int] | None = None  # what the host's name stands for
    incarnation: str = ""
    anew: bool = False  # a kept connection has failed

    @property
    def whom(self) -> Whom:
        return Whom(self.hello.acceptor, self.incarnation, self.address)


class Reception:
    """See the module. Methods may be called from any thread.

    Args:
        task: this worker's number; links for others are refused.
        secret: the job's secret; empty: no link is let in or dialled until `prove_with` gives one.
        door: path of the Unix socket for clients; a file that a killed worker left there is taken over.
        link_address: (host, port) to listen on for links; port 0 is chosen by the system.
        refusals: counts who is turned away. logins: who has shown a wrong proof too often.
        most_guests: that have not said who they are, of each of the two kinds.
        descriptors: how many this process may have.
        contexts: of TLS, which links then speak below the hello; None: they speak it in plain text.

    Raises:
        OSError: an address is in use or not ours.
    """

    def __init__(
        self,
        task: int,
        secret: str,
        door: str,
        link_address: tuple[str, int],
        refusals: Refusals | None = None,
        logins: Logins | None = None,
        most_guests: int = MOST_GUESTS,
        descriptors: int = WANTED,
        contexts: Contexts | None = None,
    ) -> None:
        self._refusals = refusals or Refusals()
        self._logins = Logins(0) if logins is None else logins
        house = House(self._refusals, self._logins, max(1, most_guests), descriptors)
        self._task = task
        self._contexts = contexts
        self._secret = secret
        self._door_path = door
        try:
            self._links = socket.create_server(link_address, backlog=128)
        except OSError as error:
            where = f"{link_address[0]}:{link_address[1]}"
            raise OSError(error.errno, f"cannot listen for links at {where}: {error.strerror}") from None
        self._links.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LINK_BUFFER_BYTES)
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            bind(self._door, door)
            self._door.listen(128)
        except OSError:
            self._links.close()
            self._door.close()
            raise
        for listener in (self._links, self._door):
            listener.setblocking(False)
        self.link_port: int = self._links.getsockname()[1]
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asked: deque[Callable[[], None]] = deque()
        self._closing = threading.Lock()  # nobody writes to a descriptor that has been closed, and perhaps reused
        self._tokens: dict[bytes, _Token] = {}  # by digest: how long a search takes tells nothing about tokens
        self._expected: dict[LinkKey, Callable[[Link], None]] = {}
        self._early: dict[LinkKey, tuple[float, Link]] = {}
        self._living: set[tuple[int, int]] = set()  # keys and generations of which somebody expects links
        self._calls: list[Call] = []
        self._resolver = Resolver()
        self._probed: Callable[[Link], None] = Link.close
        self._entrances: dict[int, Entrance[Guest]] = {
            self._links.fileno(): Entrance(self._links, Where.HANDSHAKE, house),
            self._door.fileno(): Entrance(self._door, Where.DOOR, house),
        }
        self._dialled: dict[int, Guest] = {}  # those to whom we go
        self._poll = select.epoll()
        self._guests = Guests(self._poll, self._refused)  # all of them
        self._kept = Kept(self._guests, contexts, descriptors, self._answer)
        self._stopping = False
        self.opened = {"dialled": 0, "accepted": 0, "kept": 0}  # links, by how they came about
        self._thread = threading.Thread(target=self._run, name="reception", daemon=True)
        self._thread.start()

    # What others ask for

    def admit(self, token: bytes, arrived: Callable[[socket.socket], None], uid: int | None = None) -> None:
        """Admits one Unix connection that shows `token` within `TOKEN_SECONDS`; `arrived` runs in this thread.

        Args:
            uid: of the user to whom the token was given, and who alone may show it; None: not known.
        """
        self._ask(
            lambda: self._tokens.__setitem__(
                sha256(token).digest(), _Token(time.monotonic() + TOKEN_SECONDS, arrived, uid)
            )
        )

    def expect(self, key: LinkKey, arrived: Callable[[Link], None]) -> None:
        """Hands the link that a peer dials for `key` to `arrived`, at once if it is here already.

        From here on all links of that generation may come before they are expected, and wait for it until `forget`.
        """

        def enter() -> None:
            if key[:2] not in self._living:
                self._living.add(key[:2])
                self._early |= {k: (math.inf, link) for k, (_, link) in self._early.items() if k[:2] == key[:2]}
            early = self._early.pop(key, None)
            if early is not None:
                arrived(early[1])
            else:
                self._expected[key] = arrived

        self._ask(enter)

    def forget(self, key: int, generation: int) -> None:
        """Links of this generation are no longer wanted."""

        def enter() -> None:
            self._living.discard((key, generation))
            for known in [k for k in self._expected if k[:2] == (key, generation)]:
                del self._expected[known]
            for known in [k for k in self._early if k[:2] == (key, generation)]:
                self._early.pop(known)[1].close()
            self._calls = [c for c in self._calls if (c.hello.key, c.hello.generation) != (key, generation)]

        self._ask(enter)

    def keep(self, link: Link, farewell: bytes) -> None:
        """Keeps the connection of a link, on which `farewell` has been said and frames are whole, for another link.

        The peer is to say the same farewell. Where nothing comes of it the link is closed.
        """
        with self._closing:
            if not self._stopping:
                self._asked.append(lambda: self._kept.keep(link, farewell))
                os.eventfd_write(self._wake, 1)
                return
        link.close()

    def dial(self, call: Call) -> None:
        def resolved(found: tuple[str, int] | str) -> None:
            def enter() -> None:
                if isinstance(found, str):
                    call.failed(call.hello.acceptor, f"{call.address[0]}:{call.address[1]}: {found}")
                else:
                    call.found = found
                    self._calls.append(call)

            self._ask(enter)

        self._resolver.resolve(call.address, resolved)

    def prove_with(self, secret: str) -> None:
        """From now on links are proved with this secret."""
        self._secret = secret

    def on_probe(self, arrived: Callable[[Link], None]) -> None:
        """Hands links that a peer wants to measure to `arrived`, in this thread; without this they are closed."""

        def enter() -> None:
            self._probed = arrived

        self._ask(enter)

    def close(self) -> None:
        """Ends the thread and closes what it holds; connections that were handed on stay."""
        with self._closing:
            if self._stopping:
                return
            self._stopping = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._resolver.close()
        os.close(self._wake)

    def _ask(self, what: Callable[[], None]) -> None:
        self._asked.append(what)
        with self._closing:
            if not self._stopping:
                os.eventfd_write(self._wake, 1)

    # The thread

    def _run(self) -> None:
        for listener in (self._links.fileno(), self._door.fileno(), self._wake):
            self._poll.register(listener, select.POLLIN)
        while not self._stopping:
            for descriptor, _ in self._poll.poll(self._patience()):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                elif descriptor in self._entrances:
                    _go_on(partial(self._accept, self._entrances[descriptor]))
                else:
                    self._guests.step(descriptor)
            while self._asked:
                _go_on(self._asked.popleft())
            self._start_calls()
            _go_on(self._show_out)
        while self._asked:
            _go_on(self._asked.popleft())
        self._guests.close()
        for _, link in self._early.values():
            link.close()
        self._links.close()
        self._door.close()
        self._poll.close()
        with contextlib.suppress(OSError):
            os.unlink(self._door_path)

    def _patience(self) -> float | None:
        """Seconds until something expires."""
        now = time.monotonic()
        times = [guest.expires for guest in self._dialled.values()] + self._kept.expires
        times += [call.not_before for call in self._calls]
        times += [token.expires for token in islice(self._tokens.values(), 1)]  # the oldest is the first to go
        times += [expires for expires, _ in self._early.values()]
        times += [at for one in self._entrances.values() for at in one.times(now)]
        first = min(times, default=math.inf)
        return None if first == math.inf else max(0.0, first - now + 0.001)

    def _show_out(self) -> None:
        now = time.monotonic()
        for one in self._entrances.values():
            for guest in one.late(now):
                self._guests.turn_away(guest)
            if one.opens(now):
                self._poll.modify(one.listener.fileno(), select.POLLIN)
        for guest in [guest for guest in self._dialled.values() if guest.expires <= now]:
            self._guests.turn_away(guest)
        self._kept.show_out(now)
        for digest in list(takewhile(lambda digest: self._tokens[digest].expires <= now, self._tokens)):
            del self._tokens[digest]
        for key in [key for key, (expires, _) in self._early.items() if expires <= now]:
            self._early.pop(key)[1].close()

    def _accept(self, entrance: Entrance[Guest]) -> None:
        came = entrance.accept(self._guests.turn_away)
        if entrance.closed_until:
            self._poll.modify(entrance.listener.fileno(), 0)
        if came is not None:
            greet = self._accept_link if entrance.listener is self._links else self._accept_client
            self._guests.receive(came[0], greet(*came), HANDSHAKE_SECONDS, entrance.guests)

    def _refused(self, guest: Guest, error: Exception) -> None:
        for one in self._entrances.values():
            if one.guests is guest.room and not isinstance(error, OSError):
                self._refusals.bad(one.what)
        known = isinstance(error, (OSError, Refused, wire.Malformed))
        log.warning("a connection was refused: %s", error, exc_info=None if known else error)

    def _accept_client(self, connection: socket.socket, _: str) -> Handshake:
        said = None
        while said is None:
            yield select.POLLIN
            with contextlib.suppress(BlockingIOError):  # the event was of another, who had the same descriptor
                said = connection.recv(256)
        token, versions = wire.parse_hello(said)
        known = self._tokens.pop(sha256(token).digest(), None)
        if known is None or known.expires <= time.monotonic():
            raise Refused("a client showed a token that is unknown, used or older than 10 s")
        if known.uid is not None and known.uid != (uid := _uid_of(connection)):
            raise Refused(f"uid {uid} showed a token that was given to another user")
        try:
            agree(versions, "the client", "this worker")
        except FailedPreconditionError as error:
            connection.send(wire.refused(error.code, str(error)))
            raise Refused(str(error)) from None
        self._guests.dismiss(self._guests.of(connection))
        known.arrived(connection)

    def _accept_link(self, connection: socket.socket, host: str) -> Handshake:
        connection = yield from self._secured(connection)
        said = yield from handshake.read(connection, hello_.HELLO_BYTES)
        yield from self._answer(connection, host, said)

    def _answer(self, connection: socket.socket, host: str, said: bytes) -> Handshake:
        """Answers a hello, and hands the link to whoever expects it."""
        try:
            hello = hello_.parse(said)
        except Refused as refused:
            yield from handshake.write(connection, refused.answer)
            raise
        if hello.acceptor != self._task:
            raise Refused(f"worker {hello.dialler} dialled worker {hello.acceptor}, this is worker {self._task}")
        nonce = os.urandom(hello_.NONCE_BYTES)
        yield from handshake.write(connection, nonce + hello_.proof(self._secret, "accept", said, nonce))
        shown = yield from handshake.read(connection, hello_.PROOF_BYTES)
        try:
            hello_.check(self._secret, "dial", said, nonce, shown)
        except Refused:
            self._logins.failed(host)
            raise
        stream = handshake.stream_of(connection)
        guest = self._guests.of(connection)
        self._guests.dismiss(guest)
        self.opened["kept" if guest.room is self._kept.greeting else "accepted"] += 1
        key = (hello.key, hello.generation, hello.dialler, hello.channel)
        link = Link(hello.dialler, hello.channel, stream, Way(connection, None))
        arrived = self._probed if hello.probe else self._expected.pop(key, None)
        if arrived is not None:
            arrived(link)
        elif len(self._early) >= MOST_EARLY:
            log.warning("a link was closed: %d have come already that nobody expects yet", MOST_EARLY)
            self._refusals.limit(Limit.LINKS)
            link.close()
        else:
            expires = math.inf if key[:2] in self._living else time.monotonic() + HANDSHAKE_SECONDS
            if older := self._early.get(key):
                older[1].close()
            self._early[key] = (expires, link)

    def _secured(self, connection: socket.socket, host: str | None = None) -> Generator[int, None, socket.socket]:
        """The connection, over TLS where links speak that. `host`: that was dialled; None: we were."""
        if self._contexts is None:
            return connection
        guest = self._guests.of(connection)
        guest.connection = secured = handshake.wrapped(connection, self._contexts, host)
        yield from handshake.prove(secured)
        return secured

    def _start_calls(self) -> None:
        now = time.monotonic()
        due = [call for call in self._calls if call.not_before <= now]
        self._calls = [call for call in self._calls if call.not_before > now]
        for call in due:
            try:
                self._start(call, now)
            except OSError as error:  # out of descriptors: it may fare better next time
                _go_on(partial(self._again, call, error))
            except Exception as error:  # whoever asked for the link must not wait for it
                log.exception("a defect of collectived: worker %d is not dialled", call.hello.acceptor)
                _go_on(partial(call.failed, call.hello.acceptor, f"a defect of collectived: {error}"))

    def _start(self, call: Call, now: float) -> None:
        assert call.found is not None
        kept = self._kept.take(call.whom) if call.incarnation and not call.anew else None
        if kept is not None:
            self._guests.receive(kept, self._call_again(kept, call), ANSWER_SECONDS, self._dialled)
            return
        connection = socket.socket(socket.AF_INET6 if ":" in call.found[0] else socket.AF_INET)
        dialling = self._dial(connection, call, call.found)
        self._guests.receive(connection, dialling, max(0.1, call.give_up - now), self._dialled)

    def _call_again(self, connection: socket.socket, call: Call) -> Handshake:
        """Says hello on a kept connection, and hands the link on; where nothing comes of it there, dials."""
        try:
            stream = yield from handshake.introduce(connection, call.hello, self._secret)
        except (Refused, OSError, GeneratorExit) as error:
            log.debug("a kept connection to worker %d is of no use: %s", call.hello.acceptor, error)
            call.anew = True
            self._calls.append(call)
            connection.close()
            return
        self._hand_on(connection, call, stream, "kept")

    def _dial(self, connection: socket.socket, call: Call, found: tuple[str, int]) -> Handshake:
        """Dials, proves, hands the link on; tries again after a pause until `give_up`."""
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINK_BUFFER_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LINK_BUFFER_BYTES)
            status = connection.connect_ex(found)
            if status == errno.EINPROGRESS:
                yield select.POLLOUT
                status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if status:
                raise OSError(status, os.strerror(status))
            connection = yield from self._secured(connection, call.address[0])
            stream = yield from handshake.introduce(connection, call.hello, self._secret)
        except Refused as error:
            call.failed(call.hello.acceptor, str(error))
            raise
        except OSError as error:
            self._again(call, error)
            raise
        except GeneratorExit:
            call.failed(call.hello.acceptor, f"no answer from {call.address[0]}:{call.address[1]}")
            raise
        except Exception as error:  # whatever it is, whoever asked for the link must not wait for it
            call.failed(call.hello.acceptor, f"{call.address[0]}:{call.address[1]}: {error}")
            raise
        self._hand_on(connection, call, stream, "dialled")

    def _hand_on(self, connection: socket.socket, call: Call, stream: Stream, how: str) -> None:
        self._guests.dismiss(self._guests.of(connection))
        self.opened[how] += 1
        call.arrived(Link(call.hello.acceptor, call.hello.channel, stream, Way(connection, call.whom)))

    def _again(self, call: Call, error: OSError) -> None:
        now = time.monotonic()
        if now < call.give_up:
            call.not_before = now + DIAL_PAUSE_SECONDS
            self._calls.append(call)
        else:
            call.failed(call.hello.acceptor, f"{call.address[0]}:{call.address[1]}: {error.strerror or error}")


def _go_on(what: Callable[[], None]) -> None:
    """Does something that one caller or guest has brought about, which must not end this thread: nobody else would come
    in any more, or go out."""
    try:
        what()
    except Exception:
        log.exception("a defect of collectived: the reception goes on without what has failed")


def _uid_of(connection: socket.socket) -> int:
    uid: int = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return uid
