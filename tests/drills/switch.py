"""The networks between the hosts of a drill: packets pass through this process, which loses and delays them as told.

Every end of a network is a TUN device. The kernel that the drills run on need not know of loss and delay (netem).
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass

_SET_INTERFACE, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000  # TUNSETIFF, IFF_TUN, IFF_NO_PI
_DESTINATION = slice(16, 20)  # of an IPv4 packet
_MOST_BYTES = 1 << 16  # of a packet
_MOST_WAITING = 4096  # packets under way; what comes beyond is lost, as in the queue of a switch


@dataclass(frozen=True, slots=True)
class Weather:
    """What becomes of packets of a network.

    Attributes:
        loss: the part of them that is lost.
        delay: seconds that each takes.
        jitter: seconds that it may take longer, so that later ones overtake it.
    """

    loss: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0


CALM = Weather()


def open_tun(name: str) -> int:
    """A new device of that name; packets are read from the descriptor and written to it.

    Raises:
        OSError: this process may not have one.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TUN | _NO_HEADER))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class Switch:
    """One network. Packets from `ends` go to the end that has their address.

    Attributes:
        weather: of all packets from now on.
        mute, deaf: ends whose packets are lost, and ends to which packets are lost.
    """

    def __init__(self, seed: int = 1) -> None:
        self.weather = CALM
        self.mute: set[int] = set()
        self.deaf: set[int] = set()
        self._ends: dict[int, int] = {}  # number -> descriptor
        self._by_address: dict[bytes, int] = {}  # -> number
        self._random = random.Random(seed)
        self._waiting: list[tuple[float, int, int, bytes]] = []  # when it arrives, order, number of the end, packet
        self._order = itertools.count()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)

    def add(self, number: int, descriptor: int, address: str) -> None:
        """Before `start`: an end, with its IPv4 address."""
        self._ends[number] = descriptor
        self._by_address[socket.inet_aton(address)] = number

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends it; the devices go with their descriptors."""
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join(5)
        for descriptor in (*self._ends.values(), self._wake):
            os.close(descriptor)

    def _run(self) -> None:
        poll = select.poll()
        numbers = {descriptor: number for number, descriptor in self._ends.items()}
        for descriptor in (*numbers, self._wake):
            poll.register(descriptor, select.POLLIN)
        while True:
            due = self._waiting[0][0] - time.monotonic() if self._waiting else None
            for descriptor, _ in poll.poll(None if due is None else max(0.0, due * 1000)):
                if descriptor == self._wake:
                    return
                self._take(numbers[descriptor], descriptor)
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                _, _, number, packet = heapq.heappop(self._waiting)
                self._deliver(number, packet)

    def _take(self, source: int, descriptor: int) -> None:
        """All packets that an end has sent."""
        while True:
            try:
                packet = os.read(descriptor, _MOST_BYTES)
            except OSError:  # there is none, or its host is gone
                return
            target = self._by_address.get(packet[_DESTINATION])
            weather = self.weather
            if target is None or source in self.mute or target in self.deaf or self._random.random() < weather.loss:
                continue
            if weather.delay or weather.jitter:
                if len(self._waiting) < _MOST_WAITING:
                    at = time.monotonic() + weather.delay + self._random.random() * weather.jitter
                    heapq.heappush(self._waiting, (at, next(self._order), target, packet))
            else:
                self._deliver(target, packet)

    def _deliver(self, target: int, packet: bytes) -> None:
        try:
            os.write(self._ends[target], packet)
        except OSError:  # it has no room, or is gone: lost
            return
