"""Segments: their geometry, and how a rank waits in one.

`Geometry` is what all ranks of a generation must share: the worker makes it and sends it with the join. `Waiting` is
private to a process: how long it looks before it sleeps depends on the cores that it may use.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import NamedTuple

from collectived_native import core
from collectived_native.cores import count_cores, may_use_all_cores

_FORMAT = struct.Struct("<9Q")
_KIB = 1024
_SHARES_BYTES = 512 * _KIB  # of all columns of a seat's part
_FOLDED_BYTES = 64 * _KIB  # that every one of many ranks reads to fold a small value
_ACROSS_BYTES = 32768 * _KIB  # of the values of all ranks that go to other hosts in a tick
_DIRECT_BYTES = 4096 * _KIB  # smaller values lie in the caches, from where ranks copy them faster than the kernel
SPIN_MICROSECONDS = 60  # for which a rank looks before it sleeps, where there are cores for it
_YIELDS = 20  # where there are not


@dataclass(frozen=True, slots=True)
class Geometry:
    """The numbers of a segment, the same for all that map it.

    Attributes:
        seats: local ranks, and the worker where it has a seat of its own: the last one, if `operated` is 1.
        start: number of the first instance.
        share: bytes that one seat moves for another in a tick, a multiple of 64.
        small: bytes of a seat's value up to which one tick carries it all.
        streamed: bytes of a result from which it is written past the caches.
        mail: bytes of each seat for letters that no receive has asked for yet.
        direct: bytes of a value for another rank from which that reads it in this rank's process, where it may.
    """

    version: int
    seats: int
    operated: int
    start: int
    share: int
    small: int
    streamed: int
    mail: int
    direct: int

    @classmethod
    def choose(
        cls,
        seats: int,
        *,
        cores: int,
        operated: bool = False,
        start: int = 0,
        mail: int = 64 << 20,
        across: int = 4 << 20,
    ) -> Geometry:
        """Choose the geometry for so many seats on so many cores; `across`: the most of `small` where `operated`."""
        share = min(128 * _KIB, max(_KIB, _SHARES_BYTES // seats // 64 * 64))
        small = (128 if seats <= cores else 64) * _KIB
        if operated:  # the worker alone folds
            small = min(across, _ACROSS_BYTES // seats // 64 * 64)
        elif seats > 8:
            small = max(256, _FOLDED_BYTES // seats)
        streamed = 24 * 1024 * _KIB // seats
        return cls(core.SCHEDULE_VERSION, seats, int(operated), start, share, small, streamed, mail, _DIRECT_BYTES)

    def encode(self) -> bytes:
        """Return the form in which it travels and in which the core takes it."""
        return _FORMAT.pack(*astuple(self))

    @classmethod
    def decode(cls, data: bytes) -> Geometry:
        """Read the form in which it travels; the core checks the numbers.

        Raises:
            ValueError: not of the right length.
        """
        if len(data) != _FORMAT.size:
            raise ValueError(f"a geometry has {_FORMAT.size} bytes, not {len(data)}")
        return cls(*_FORMAT.unpack(data))


@dataclass(frozen=True, slots=True)
class Waiting:
    """How the ranks of this process wait.

    Attributes:
        spin_ns: for which a rank looks at most before it sleeps.
        yields: how often it gives up its core before it sleeps.
        hops: whether it may move to another core where two ranks share one.
        is_operated: whether the worker operates the seat, and calls `advance` when its eventfd (`knock`) says so.
        shows_memory: whether it and the others read large values in each other's processes, if the kernel permits that.
    """

    spin_ns: int
    yields: int
    hops: bool
    is_operated: bool = False
    shows_memory: bool = True

    @classmethod
    def choose(cls, seats: int, environment: Mapping[str, str] = os.environ) -> Waiting:
        """Choose it for a segment of so many seats: no looking where cores are short.

        `COLLECTIVED_SPIN` is the number of microseconds for which a rank looks, 0 for never; `COLLECTIVED_HOP=0`
        keeps ranks where they are; with `COLLECTIVED_DIRECT=0` no rank reads in another's process.

        Raises:
            ValueError: a variable is not what it must be.
        """
        text = environment.get("COLLECTIVED_SPIN", "")
        if text and not text.isdecimal():
            raise ValueError(f"COLLECTIVED_SPIN={text!r}: expected microseconds, such as {SPIN_MICROSECONDS}, or 0")
        spin = int(text) if text else SPIN_MICROSECONDS
        if not text and seats > count_cores():
            spin = 0
        return cls(
            spin * 1000,
            0 if spin else _YIELDS,
            environment.get("COLLECTIVED_HOP") != "0" and may_use_all_cores(),
            shows_memory=environment.get("COLLECTIVED_DIRECT") != "0",
        )


OPERATED = Waiting(0, 0, False, is_operated=True, shows_memory=False)


class SeatState(NamedTuple):
    """The published state of a seat; written by its process, so not to be trusted.

    Attributes:
        instance, ticks: it has contributed all to the instances before, and so many ticks to this one.
        published: ticks since the segment was made.
        record_instance: of which instance the following is said; 2**64 - 1: of none.
        digest_low, digest_high: of its contract, little-endian halves. terms: as given to its plan.
        flags: bit 0: takes what comes. deadline, began: nanoseconds of the worker's monotonic clock; 0: none.
        asked: nanoseconds that its caller gave it.
        description: the number given to its plan.
        slept, hops: how often it slept, and moved to another core. cpu: 1 + the core on which it waited last.
    """

    instance: int
    ticks: int
    published: int
    record_instance: int
    digest_low: int
    digest_high: int
    terms: int
    flags: int
    deadline: int
    asked: int
    description: int
    began: int
    slept: int
    hops: int
    cpu: int


class Total(NamedTuple):
    """The completed calls of a seat for one description; written by its process, so not to be trusted.

    Attributes:
        description: the number given to its plans; -1: all others of that operation. operation: as in its plans.
        bytes: of values, the root's where it alone has one. nanoseconds: from submission to completion.
    """

    description: int
    operation: int
    calls: int
    bytes: int
    nanoseconds: int


class Past(NamedTuple):
    """A seat's memory of an instance that it has completed; written by its process, so not to be trusted.

    Attributes:
        description: the number given to its plan.
        began, ended: when it was submitted, and this seat had its result; nanoseconds of the worker's monotonic clock.
    """

    instance: int
    description: int
    began: int
    ended: int


class Review(NamedTuple):
    """The open instance, as the worker finds it.

    Attributes:
        published: seats that have come. missing: those that have not. disputed: a seat whose contract differs, or -1.
        deadline_ns: until the earliest deadline; -1: there is none.
    """

    instance: int
    published: tuple[int, ...]
    missing: tuple[int, ...]
    disputed: int
    deadline_ns: int


def create(geometry: Geometry) -> int:
    """Make a segment: a sealed memfd, whose descriptor is returned."""
    return core.create_segment(geometry.encode())


def watch(descriptor: int, geometry: Geometry) -> core.Watcher:
    """Map a segment, to watch it. The descriptor may be closed afterwards."""
    return core.watch(descriptor, geometry.encode())


def attach(
    descriptor: int,
    geometry: Geometry,
    seat: int,
    *,
    waiting: Waiting | None = None,
    knock: int = -1,
    doorbell: int = -1,
    clock_offset_ns: int = 0,
) -> core.Engine:
    """Take a seat in a segment. Its descriptor and `knock` may be closed afterwards; `doorbell` only after `detach`.

    Args:
        waiting: how this rank waits; None: as the environment and the cores say.
        knock: an eventfd that is written when this rank has waited long.
        doorbell: a socket whose other end is the worker.
        clock_offset_ns: the worker's monotonic clock minus this process's.
    """
    waiting = waiting or Waiting.choose(geometry.seats)
    return core.attach(
        descriptor,
        geometry.encode(),
        seat,
        waiting.spin_ns,
        waiting.yields,
        waiting.hops,
        knock,
        doorbell,
        clock_offset_ns,
        waiting.is_operated,
        waiting.shows_memory,
    )
