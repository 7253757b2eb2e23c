"""The kernel's knowledge of the path below a TCP connection: whether it still lives, and its round trip.

Unacknowledged bytes are sent again, and a silent host is asked for a sign of life (keep-alive).
The kernel of the other host answers, also for a process that is stopped, busy, or reads nothing. So a path is dead, and
not slow, if several such packets in a row have had no answer for a while.

Where a process has read nothing for minutes, its kernel is asked less and less often, every two minutes at last: a path
that dies then is found dead that much later.
"""

from __future__ import annotations

import math
import os
import socket
import struct

# Of `struct tcp_info`: retransmits, probes, and milliseconds since the latest data and the latest acknowledgement.
_INFO = struct.Struct("=2x2B48xII")
_ROUND_TRIP = struct.Struct("=148xI")  # of the same: the shortest that was seen, in microseconds
_NO_ROUND_TRIP = (1 << 32) - 1
_LEAST_UNANSWERED = 2  # packets
_MOST_PROBES = 127  # the kernel itself gives up later than the worker


def measure_silence(descriptor: int, probe_after: float) -> float:
    """For how many seconds nothing has come from the other host, if packets to it have had no answer; else 0.0.

    From the first look on, until `stop_probing`, the kernel probes a path on which nothing has come for `probe_after`
    seconds.

    Raises:
        OSError: the connection is gone, or this process has no descriptor left.
    """
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return 0.0
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
            _probe(connection, max(1, math.floor(probe_after)))
        return read_silence(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))


def measure_round_trip(descriptor: int) -> float:
    """The shortest time in seconds in which the other host's kernel has acknowledged something; 0.0 if not known.

    Raises:
        OSError: as `measure_silence`.
    """
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return 0.0
        return read_round_trip(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ROUND_TRIP.size))


def read_round_trip(info: bytes) -> float:
    """The same, of a `struct tcp_info`. Pure."""
    if len(info) < _ROUND_TRIP.size:  # of a kernel before Linux 4.6
        return 0.0
    (microseconds,) = _ROUND_TRIP.unpack(info)
    return 0.0 if microseconds == _NO_ROUND_TRIP else microseconds / 1e6


def stop_probing(descriptor: int) -> None:
    """End the probes of a path for which no task waits any more.

    Raises:
        OSError: as `measure_silence`.
    """
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)


def _probe(connection: socket.socket, seconds: int) -> None:
    for option, value in (
        (socket.TCP_KEEPIDLE, seconds),
        (socket.TCP_KEEPINTVL, seconds),
        (socket.TCP_KEEPCNT, _MOST_PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def read_silence(info: bytes) -> float:
    """The same, of a `struct tcp_info`. Pure."""
    retransmits, probes, *milliseconds = _INFO.unpack(info)
    return min(milliseconds) / 1000 if retransmits + probes >= _LEAST_UNANSWERED else 0.0
