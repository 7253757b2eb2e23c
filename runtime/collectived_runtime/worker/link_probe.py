"""Probes: what the link to another worker is like, measured over a connection of its own.

After the hello of every link (key 0, generation 0, channel `PROBE_CHANNEL`) the asking side sends *requests*: the
length of what follows in four bytes, then so many bytes. Each is answered by `ANSWER_BYTES` when it is there. Larger
ones measure the bandwidth; they grow until one takes long enough to be measured, so that a slow link is not kept busy.
The kernels know the latency: an answer to a small request waits for threads of Python at both ends, which a frame does
not, and counts only where the kernel is not asked. Everything happens in a thread that lives for `PROBE_SECONDS` at
most, on either side; so many as `MAX_CONCURRENT_PROBES` are answered at once.
"""

from __future__ import annotations

import logging
import os
import select
import statistics
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from collectived_proto.addresses import parse_address
from collectived_runtime.engine.run.links import LinkProvider
from collectived_runtime.transport.dial import DialRequest
from collectived_runtime.transport.hello import NONCE_BYTES, PROBE_CHANNEL, LinkHello
from collectived_runtime.transport.link import Link, LinkBroken, Stream
from collectived_runtime.transport.path import measure_round_trip

log = logging.getLogger("collectived.probe")

PROBE_SECONDS = 2.0
ANSWER_BYTES = 64
ROUNDS = 20
MAX_CONCURRENT_PROBES = 4  # at once: of a group one or two workers probe this one
BLOCK_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20)
LONG_ENOUGH_SECONDS = 0.05
HANDLING_SECONDS = 25e-6  # from the arrival of a frame until a worker that waits has read it
_LENGTH = struct.Struct("<I")
_PIECE_BYTES = 256 << 10
_ZEROS = bytes(_PIECE_BYTES)


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """The measurement of a link in one direction; zeros and `error`, where it failed."""

    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0
    error: str = ""


def start_probe(
    me: int, peer: int, address: str, exchange: LinkProvider, found: Callable[[LinkMeasurement], None]
) -> None:
    """Measures the link of worker `me` to worker `peer`; returns at once, `found` is called later, in a thread.

    Args:
        address: where the peer accepts links, `host:port`.
    """
    until = time.monotonic() + PROBE_SECONDS

    def arrived(link: Link) -> None:
        _start_thread(f"probe of {peer}", lambda: found(_measure(link, until)))

    def failed(error: LinkBroken) -> None:
        found(LinkMeasurement(error=str(error)))

    try:
        where = parse_address(address)
    except ValueError:
        found(LinkMeasurement(error=f"the link address of worker {peer} is {address!r}, expected host:port"))
        return
    hello = LinkHello(me, peer, 0, 0, PROBE_CHANNEL, os.urandom(NONCE_BYTES))
    exchange.dial(DialRequest(where, hello, arrived, failed, until))


class ProbeServer:
    """Answers probes of other workers, `MAX_CONCURRENT_PROBES` at once."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(MAX_CONCURRENT_PROBES)

    def serve_in_thread(self, link: Link) -> None:
        """Answer the requests that come in on a link until it ends, in a thread; where there are enough, close it."""
        if not self._slots.acquire(blocking=False):
            log.warning("a probe of worker %d was closed: %d are answered at once", link.peer, MAX_CONCURRENT_PROBES)
            link.close()
            return
        _start_thread(f"probed by {link.peer}", lambda: self._serve_link(link))

    def _serve_link(self, link: Link) -> None:
        try:
            serve_requests(link.stream, time.monotonic() + PROBE_SECONDS)
        except (LinkBroken, TimeoutError) as error:
            log.debug("worker %d has probed this one: %s", link.peer, error)
        finally:
            self._slots.release()
            link.close()


def _start_thread(name: str, body: Callable[[], None]) -> None:
    threading.Thread(target=body, name=name, daemon=True).start()


def _measure(link: Link, until: float) -> LinkMeasurement:
    try:
        return measure(link.stream, until)
    except LinkBroken as error:
        return LinkMeasurement(error=str(error))
    except TimeoutError:
        return LinkMeasurement(error=f"worker {link.peer} did not answer within {PROBE_SECONDS} s")
    finally:
        link.close()


def measure(stream: Stream, until: float) -> LinkMeasurement:
    """Ask a peer that runs `serve_requests` at the other end.

    Raises:
        LinkBroken: the peer has gone.
        TimeoutError: `until`, on the monotonic clock, has passed.
    """
    answer = statistics.median(_time_request(stream, ANSWER_BYTES, until) for _ in range(ROUNDS))
    round_trip = _ask_kernel(stream)
    bandwidth = 0.0
    for nbytes in BLOCK_SIZES:
        taken = min(_time_request(stream, nbytes, until) for _ in range(2))
        bandwidth = nbytes / max(taken - answer, taken / 10)
        if taken > LONG_ENOUGH_SECONDS:
            break
    return LinkMeasurement(estimate_latency(answer, round_trip), bandwidth)


def estimate_latency(answer: float, round_trip: float) -> float:
    """Seconds until a frame of the peer has been read. Pure.

    Args:
        answer: seconds that an answer has taken. round_trip: the kernels' alone; 0: not known.
    """
    return min(answer, round_trip + 2 * HANDLING_SECONDS if round_trip else answer) / 2


def _ask_kernel(stream: Stream) -> float:
    try:
        return measure_round_trip(stream.fileno())
    except OSError:  # as where there is no descriptor left
        return 0.0


def serve_requests(stream: Stream, until: float) -> None:
    """Answer requests. Ends by raising: LinkBroken, when the peer has what it wants; TimeoutError after `until`."""
    length = bytearray(_LENGTH.size)
    while True:
        _receive(stream, memoryview(length), until)
        (rest,) = _LENGTH.unpack(length)
        if rest > BLOCK_SIZES[-1]:
            raise LinkBroken(f"a request of {rest} bytes was announced, {BLOCK_SIZES[-1]} are allowed")
        _discard(stream, rest, until)
        _send(stream, ANSWER_BYTES, until)


def _time_request(stream: Stream, nbytes: int, until: float) -> float:
    """Seconds from the first byte of a request of `nbytes` in all to the last one of its answer."""
    begin = time.monotonic()
    rest = nbytes - _LENGTH.size
    _send(stream, rest, until, _LENGTH.pack(rest))
    _discard(stream, ANSWER_BYTES, until)
    return time.monotonic() - begin


def _send(stream: Stream, zeros: int, until: float, first: bytes = b"") -> None:
    """Send `first`, then so many zeros."""
    rest = len(first) + zeros
    piece = memoryview(first + bytes(min(zeros, _PIECE_BYTES - len(first))))
    while rest:
        taken = stream.send([piece[:rest]])
        piece = piece[taken:] or memoryview(_ZEROS)
        rest -= taken
        _wait(stream, select.POLLOUT, until, block=not taken)


def _discard(stream: Stream, count: int, until: float) -> None:
    scratch = memoryview(bytearray(min(count, _PIECE_BYTES)))
    while count:
        _receive(stream, scratch[:count], until)
        count -= min(count, len(scratch))


def _receive(stream: Stream, view: memoryview, until: float) -> None:
    while view:
        received = stream.recv_into(view)
        view = view[received:]
        _wait(stream, select.POLLIN, until, block=not received)


def _wait(stream: Stream, event: int, until: float, block: bool) -> None:
    """Wait for an event where there is reason to `block`.

    Raises:
        TimeoutError: time is up, whether or not there was something to wait for.
    """
    remaining = until - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the time for this probe is up")
    if block:
        poll = select.poll()
        poll.register(stream.fileno(), event)
        poll.poll(remaining * 1000)
