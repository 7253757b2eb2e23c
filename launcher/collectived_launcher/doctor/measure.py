"""A measuring session between two hosts: who is there, how far, how fast, and what time it is.

One TCP connection, one session, about a second. The *token* is known to both sides and is good once; it never travels.

    dialler  → server     magic, a fresh nonce
    server   → dialler    a fresh nonce, HMAC-SHA256(token, "serve" + both nonces)
    dialler  → server     HMAC-SHA256(token, "dial" + both nonces)
    both     → other      a frame: what it says of itself, as JSON
    then the dialler asks, one byte at a time:
    T                     the server's Unix time, 8 bytes
    U, chunks             the server takes chunks, and answers how many bytes it took in how many seconds
    D                     the server sends chunks

A *chunk* is one byte, 1, then a mebibyte; one byte, 0, ends them. Every wait has a limit, and so has the whole.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from collectived_launcher.doctor.facts import Measured, Peer
from collectived_launcher.doctor.probes.network import interface_of
from collectived_proto.deadline import Deadline

_MAGIC = b"CDM\x01"
_NONCE, _PROOF = 16, 32
_CHUNK = 1 << 20
_FOR = 0.5  # seconds of chunks in each direction
_ROUNDS = 20
_STEP = 5.0  # seconds for one answer
_WHOLE = 20.0  # seconds for a session
_MOST_SAID = 1 << 16  # bytes that a peer may say of itself
_LENGTH, _TIME, _TAKEN = struct.Struct(">I"), struct.Struct(">d"), struct.Struct(">Qd")
_MORE, _END = b"\1" + bytes(_CHUNK), b"\0"


class Refused(Exception):
    """The other side is not who it should be, or does not do what was agreed."""


def new_token() -> str:
    return secrets.token_urlsafe(16)


class Server:
    """Waits at an address for the one who has the token. A context manager.

    Raises:
        OSError: the address cannot be listened at.
    """

    def __init__(self, host: str, port: int, token: str, me: Peer) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._token, self._me = token, me
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def serve(self, within: float) -> Peer:
        """One session; returns with whom.

        Raises:
            TimeoutError: nobody with the token has come.
            Refused: who came did something else than was agreed.
            OSError: the session broke.
        """
        deadline = Deadline.after(within)
        while left := deadline.remaining():
            self._listener.settimeout(left if deadline.is_set else None)
            connection, _ = self._listener.accept()
            with connection:
                try:
                    pipe = _Pipe(connection)
                    _prove_as_server(pipe, self._token)
                except (Refused, OSError):  # a port scanner, or a slip of the hand; the token cannot be guessed
                    continue
                try:
                    return _answer(pipe, self._me)
                except TimeoutError:
                    raise Refused("the other side has stopped answering") from None
        raise TimeoutError


def measure(host: str, port: int, token: str, me: Peer) -> Measured:
    """Dials a server, and measures; a failure is told in the result."""
    address = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=_STEP) as connection:
            pipe = _Pipe(connection)
            _prove_as_dialler(pipe, token)
            return _ask(pipe, address, me)
    except TimeoutError:
        return Measured(address, trouble=f"no answer within {_STEP:g} s")
    except OSError as error:
        return Measured(address, trouble=error.strerror or str(error))
    except Refused as error:
        return Measured(address, trouble=str(error), refused=True)
    except ValueError as error:
        return Measured(address, trouble=f"it says something else of itself than doctors do: {error}")


class _Pipe:
    """A connection whose every wait is bounded."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._deadline = Deadline.after(_WHOLE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._room = bytearray(_CHUNK)

    def send(self, data: bytes) -> None:
        self._bound()
        self.connection.sendall(data)

    def read(self, size: int) -> bytes:
        self.fill(size)
        return bytes(self._room[:size])

    def fill(self, size: int) -> None:
        """Reads so many bytes, at most a chunk, for `read` or to be forgotten."""
        view, have = memoryview(self._room), 0
        while have < size:
            self._bound()
            got = self.connection.recv_into(view[have:size])
            if not got:
                raise Refused("it hung up: the token is another, or the session is over")
            have += got

    def _bound(self) -> None:
        left = min(_STEP, self._deadline.remaining())
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)


def _proof(token: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(token.encode(), side + nonces, hashlib.sha256).digest()


def _prove_as_server(pipe: _Pipe, token: str) -> None:
    hello = pipe.read(len(_MAGIC) + _NONCE)
    if not hello.startswith(_MAGIC):
        raise Refused("the caller is no doctor")
    mine = secrets.token_bytes(_NONCE)
    nonces = hello[len(_MAGIC) :] + mine
    pipe.send(mine + _proof(token, b"serve", nonces))
    if not hmac.compare_digest(pipe.read(_PROOF), _proof(token, b"dial", nonces)):
        raise Refused("the caller has another token")


def _prove_as_dialler(pipe: _Pipe, token: str) -> None:
    mine = secrets.token_bytes(_NONCE)
    pipe.send(_MAGIC + mine)
    nonces = mine + pipe.read(_NONCE)
    if not hmac.compare_digest(pipe.read(_PROOF), _proof(token, b"serve", nonces)):
        raise Refused("who listens there has another token, or is no doctor")
    pipe.send(_proof(token, b"dial", nonces))


def _introduce(pipe: _Pipe, me: Peer) -> Peer:
    said = json.dumps(asdict(me)).encode()
    pipe.send(_LENGTH.pack(len(said)) + said)
    (length,) = _LENGTH.unpack(pipe.read(_LENGTH.size))
    if length > _MOST_SAID:
        raise Refused(f"it wants to say {length} bytes of itself")
    return _peer(json.loads(pipe.read(length)))


def _peer(said: Any) -> Peer:
    texts = {"hostname", "release", "python"}
    if not isinstance(said, dict) or set(said) != {*texts, "libraries"} or not isinstance(said["libraries"], dict):
        raise Refused("it says something else of itself than doctors do")
    libraries = {str(name): str(version) for name, version in said["libraries"].items()}
    return Peer(libraries=libraries, **{name: str(said[name])[:200] for name in texts})


def _answer(pipe: _Pipe, me: Peer) -> Peer:
    """The server's part, until the dialler hangs up."""
    peer = _introduce(pipe, me)
    while True:
        try:
            asked = pipe.read(1)
        except Refused:  # hung up: it has all it wanted
            return peer
        match asked:
            case b"T":
                pipe.send(_TIME.pack(time.time()))
            case b"U":
                pipe.send(_TAKEN.pack(*_take(pipe)))
            case b"D":
                _give(pipe)
            case _:
                raise Refused(f"the dialler asks {asked!r}")


def _ask(pipe: _Pipe, address: str, me: Peer) -> Measured:
    peer = _introduce(pipe, me)
    rounds = list(_times(pipe))
    round_trip, ahead = min(rounds)
    pipe.send(b"U")
    _give(pipe)
    sent, sending = _TAKEN.unpack(pipe.read(_TAKEN.size))
    pipe.send(b"D")
    received, receiving = _take(pipe)
    return Measured(
        address,
        peer,
        sorted(rounds)[len(rounds) // 2][0],
        ahead,
        sent / max(sending, 1e-9),
        received / max(receiving, 1e-9),
        interface_of(str(pipe.connection.getsockname()[0])),
    )


def _times(pipe: _Pipe) -> Iterator[tuple[float, float]]:
    """(seconds of a round, seconds that the other clock is ahead): the quickest round knows the latter best."""
    for _ in range(_ROUNDS):
        asked, since = time.time(), time.monotonic()
        pipe.send(b"T")
        (there,) = _TIME.unpack(pipe.read(_TIME.size))
        seconds = time.monotonic() - since
        yield seconds, there - (asked + seconds / 2)


def _give(pipe: _Pipe) -> None:
    until = time.monotonic() + _FOR
    while time.monotonic() < until:
        pipe.send(_MORE)
    pipe.send(_END)


def _take(pipe: _Pipe) -> tuple[int, float]:
    """Bytes, and the seconds from the first of them."""
    taken, since = 0, time.monotonic()
    while pipe.read(1) != _END:
        pipe.fill(_CHUNK)
        taken += _CHUNK
    return taken, time.monotonic() - since
