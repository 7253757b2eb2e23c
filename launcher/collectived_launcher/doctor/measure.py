"""A measuring session between two hosts: the peer, the round trip, the bandwidth, and the clock.

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

`serve` and `dial` are the two ends as commands: `doctor --serve` on one host, `doctor --to` on another.
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

import click

from collectived_launcher.doctor.checks import CHECKS, evaluate_measurement
from collectived_launcher.doctor.collect import collect_facts
from collectived_launcher.doctor.facts import Facts, PathMeasurement, PeerFacts, UnknownFact
from collectived_launcher.doctor.finding import Finding
from collectived_launcher.doctor.probes.network import find_interface
from collectived_proto.deadline import Deadline

_MAGIC = b"CDM\x01"
_NONCE, _PROOF = 16, 32
_CHUNK = 1 << 20
_TRANSFER_SECONDS = 0.5  # seconds of chunks in each direction
_ROUNDS = 20
_STEP_TIMEOUT = 5.0  # seconds for one answer
_SESSION_TIMEOUT = 20.0  # seconds for a session
_MAX_PEER_BYTES = 1 << 16  # bytes that a peer may say of itself
_LENGTH, _TIME, _RECEIVED = struct.Struct(">I"), struct.Struct(">d"), struct.Struct(">Qd")
_CHUNK_FRAME, _END_FRAME = b"\1" + bytes(_CHUNK), b"\0"
_PEER_CHECKS = [check for check in CHECKS if check.name in ("python", "interfaces")]


class MeasurementRefused(Exception):
    """The other side has another token, or does not follow the protocol."""


def new_token() -> str:
    return secrets.token_urlsafe(16)


class MeasurementServer:
    """Waits at an address for the caller that has the token. A context manager.

    Raises:
        OSError: the address cannot be listened at.
    """

    def __init__(self, host: str, port: int, token: str, me: PeerFacts) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._token, self._own_facts = token, me
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> MeasurementServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def serve(self, within: float) -> PeerFacts:
        """Serve one session, and return its peer.

        Raises:
            TimeoutError: no caller with the token has come.
            MeasurementRefused: the caller did not follow the protocol.
            OSError: the session broke.
        """
        deadline = Deadline.after(within)
        while left := deadline.remaining():
            self._listener.settimeout(left if deadline.is_set else None)
            connection, _ = self._listener.accept()
            with connection:
                try:
                    pipe = _Connection(connection)
                    _authenticate_as_server(pipe, self._token)
                # A port scanner, or a slip of the hand; the token cannot be guessed.
                except (MeasurementRefused, OSError):
                    continue
                try:
                    return _serve_requests(pipe, self._own_facts)
                except TimeoutError:
                    raise MeasurementRefused("the other side has stopped answering") from None
        raise TimeoutError


def measure_path(host: str, port: int, token: str, me: PeerFacts) -> PathMeasurement:
    """Dial a server, and measure. A failure is in the result."""
    address = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=_STEP_TIMEOUT) as connection:
            pipe = _Connection(connection)
            _authenticate_as_dialler(pipe, token)
            return _measure(pipe, address, me)
    except TimeoutError:
        return PathMeasurement(address, trouble=f"no answer within {_STEP_TIMEOUT:g} s")
    except OSError as error:
        return PathMeasurement(address, trouble=error.strerror or str(error))
    except MeasurementRefused as error:
        return PathMeasurement(address, trouble=str(error), refused=True)
    except ValueError as error:
        return PathMeasurement(address, trouble=f"it says something else of itself than doctors do: {error}")


class _Connection:
    """A connection whose every wait is bounded."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._deadline = Deadline.after(_SESSION_TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(_CHUNK)

    def send(self, data: bytes) -> None:
        self._set_timeout()
        self.connection.sendall(data)

    def read(self, size: int) -> bytes:
        self.receive_into_buffer(size)
        return bytes(self._buffer[:size])

    def receive_into_buffer(self, size: int) -> None:
        """Reads so many bytes, at most a chunk, for `read` or to be forgotten."""
        view, have = memoryview(self._buffer), 0
        while have < size:
            self._set_timeout()
            got = self.connection.recv_into(view[have:size])
            if not got:
                raise MeasurementRefused("it hung up: the token is another, or the session is over")
            have += got

    def _set_timeout(self) -> None:
        left = min(_STEP_TIMEOUT, self._deadline.remaining())
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)


def _proof(token: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(token.encode(), side + nonces, hashlib.sha256).digest()


def _authenticate_as_server(pipe: _Connection, token: str) -> None:
    hello = pipe.read(len(_MAGIC) + _NONCE)
    if not hello.startswith(_MAGIC):
        raise MeasurementRefused("the caller is no doctor")
    mine = secrets.token_bytes(_NONCE)
    nonces = hello[len(_MAGIC) :] + mine
    pipe.send(mine + _proof(token, b"serve", nonces))
    if not hmac.compare_digest(pipe.read(_PROOF), _proof(token, b"dial", nonces)):
        raise MeasurementRefused("the caller has another token")


def _authenticate_as_dialler(pipe: _Connection, token: str) -> None:
    mine = secrets.token_bytes(_NONCE)
    pipe.send(_MAGIC + mine)
    nonces = mine + pipe.read(_NONCE)
    if not hmac.compare_digest(pipe.read(_PROOF), _proof(token, b"serve", nonces)):
        raise MeasurementRefused("the listener there has another token, or is not `collectived doctor`")
    pipe.send(_proof(token, b"dial", nonces))


def _exchange_peer_facts(pipe: _Connection, me: PeerFacts) -> PeerFacts:
    said = json.dumps(asdict(me)).encode()
    pipe.send(_LENGTH.pack(len(said)) + said)
    (length,) = _LENGTH.unpack(pipe.read(_LENGTH.size))
    if length > _MAX_PEER_BYTES:
        raise MeasurementRefused(f"it wants to say {length} bytes of itself")
    return _parse_peer(json.loads(pipe.read(length)))


def _parse_peer(said: Any) -> PeerFacts:
    texts = {"hostname", "release", "python"}
    if not isinstance(said, dict) or set(said) != {*texts, "libraries"} or not isinstance(said["libraries"], dict):
        raise MeasurementRefused("it says something else of itself than doctors do")
    libraries = {str(name): str(version) for name, version in said["libraries"].items()}
    return PeerFacts(libraries=libraries, **{name: str(said[name])[:200] for name in texts})


def _serve_requests(pipe: _Connection, me: PeerFacts) -> PeerFacts:
    """The server's part, until the dialler hangs up."""
    peer = _exchange_peer_facts(pipe, me)
    while True:
        try:
            asked = pipe.read(1)
        except MeasurementRefused:  # hung up: it has all it wanted
            return peer
        match asked:
            case b"T":
                pipe.send(_TIME.pack(time.time()))
            case b"U":
                pipe.send(_RECEIVED.pack(*_receive_chunks(pipe)))
            case b"D":
                _send_chunks(pipe)
            case _:
                raise MeasurementRefused(f"the dialler asks {asked!r}")


def _measure(pipe: _Connection, address: str, me: PeerFacts) -> PathMeasurement:
    peer = _exchange_peer_facts(pipe, me)
    rounds = list(_measure_round_trips(pipe))
    round_trip, ahead = min(rounds)
    pipe.send(b"U")
    _send_chunks(pipe)
    sent, sending = _RECEIVED.unpack(pipe.read(_RECEIVED.size))
    pipe.send(b"D")
    received, receiving = _receive_chunks(pipe)
    return PathMeasurement(
        address,
        peer,
        sorted(rounds)[len(rounds) // 2][0],
        ahead,
        sent / max(sending, 1e-9),
        received / max(receiving, 1e-9),
        find_interface(str(pipe.connection.getsockname()[0])),
    )


def _measure_round_trips(pipe: _Connection) -> Iterator[tuple[float, float]]:
    """(seconds of a round, seconds that the other clock is ahead): the quickest round knows the latter best."""
    for _ in range(_ROUNDS):
        asked, since = time.time(), time.monotonic()
        pipe.send(b"T")
        (there,) = _TIME.unpack(pipe.read(_TIME.size))
        seconds = time.monotonic() - since
        yield seconds, there - (asked + seconds / 2)


def _send_chunks(pipe: _Connection) -> None:
    until = time.monotonic() + _TRANSFER_SECONDS
    while time.monotonic() < until:
        pipe.send(_CHUNK_FRAME)
    pipe.send(_END_FRAME)


def _receive_chunks(pipe: _Connection) -> tuple[int, float]:
    """Bytes, and the seconds from the first of them."""
    taken, since = 0, time.monotonic()
    while pipe.read(1) != _END_FRAME:
        pipe.receive_into_buffer(_CHUNK)
        taken += _CHUNK
    return taken, time.monotonic() - since


def serve(host: str, port: int, within: float, as_json: bool) -> int:
    """Wait for one session; `as_json` prints the address and the token alone. Return the exit status."""
    token = new_token()
    try:
        server = MeasurementServer(host, port, token, describe_this_host(collect_facts({}, _PEER_CHECKS)))
    except OSError as error:
        raise click.ClickException(f"cannot listen at {host}:{port}: {error.strerror or error}") from error
    with server:
        address = f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}"
        if as_json:
            click.echo(json.dumps({"address": address, "token": token}))
        else:
            click.echo(
                f"waiting at {address} for one measurement, {within:g} s at most; on the other host, type\n"
                f"    collectived doctor --to {address}\n"
                f"and give it this token, which is good once: {token}"
            )
        try:
            peer = server.serve(within)
        except TimeoutError:
            raise click.ClickException(f"no caller with the token came to {address} within {within:g} s") from None
        except (MeasurementRefused, OSError, ValueError) as error:
            raise click.ClickException(f"the measurement at {address} broke off: {error}") from error
    if not as_json:
        click.echo(f"measured with {peer.hostname}, which shows the result")
    return 0


def dial(host: str, port: int, token: str) -> tuple[list[Finding], Facts]:
    """Measure to a server. Return the findings, and the facts with which it was judged."""
    facts = collect_facts({}, _PEER_CHECKS)
    found = measure_path(host, port, token, describe_this_host(facts))
    return list(evaluate_measurement(found, facts, found.peer.hostname if found.peer else host)), facts


def describe_this_host(facts: Facts) -> PeerFacts:
    """Describe this host for the other one."""
    network, software = facts.network, facts.software
    hostname = "unknown" if isinstance(network, UnknownFact) else network.hostname
    if isinstance(software, UnknownFact):
        return PeerFacts(hostname, "0", "0", {})
    libraries = {library.name: library.installed or "" for library in software.libraries}
    return PeerFacts(hostname, software.release, software.python, libraries)
