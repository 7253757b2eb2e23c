"""A local rank of a group loop: its doorbell, its view of the client's memory, and the messages that it has got."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectived_proto.device_results import is_carried_on_gpus
from collectived_proto.ipc import messages
from collectived_proto.ipc.arena import Arena
from collectived_proto.types import DType, Member
from collectived_runtime.device.gpus import Gpu, Region
from collectived_runtime.engine.base.lent import MemoryHolder
from collectived_runtime.engine.submit.contracts import PreparedCollective

log = logging.getLogger("collectived.group_loop")

DISCONNECT_ERRORS = (BrokenPipeError, ConnectionError)  # how a client that is gone shows when we send

_INT = struct.Struct("i")
_MAX_ITEMSIZE = max(dtype.itemsize for dtype in DType)
HostOrGpuBytes = NDArray[np.uint8] | Region  # of the host, or of a GPU
# (arena, offset, length in bytes) -> that memory; raises MalformedMessage where it is not the client's
MemoryResolver = Callable[[int, int, int], HostOrGpuBytes]


class CompletionSink(Protocol):
    """Takes the messages for a rank without a doorbell.

    Called in the group loop's thread, which it must not hold up.
    """

    def add_arena(self, arena: Arena) -> None:
        """Take note of an arena, before any result lies there."""

    def remove_arena(self, arena: Arena) -> None:
        """No result will lie in this arena any more, and none that this rank has not released does."""

    def send(self, message: bytes) -> None:
        """A message as it would go over a doorbell."""

    def close(self) -> None:
        """No more messages will come, and results of this rank may be overwritten from here on."""


class LocalRank:
    """One rank of this worker, as its group loop serves it.

    Args:
        memory: resolves addresses in the client's arenas, checked.
        pidfd: becomes readable when the client's process ends; taken over. -1: none.
        closed: called once, when this local rank will look into the client's memory no more.
        outlet: takes the messages for the rank; None: it connects a doorbell.
        holder: its session, which arenas of results are handed to.
    """

    def __init__(
        self,
        rank: int,
        member: Member,
        memory: MemoryResolver,
        pidfd: int,
        closed: Callable[[], None] = lambda: None,
        outlet: CompletionSink | None = None,
        holder: MemoryHolder | None = None,
    ) -> None:
        self.rank = rank
        self.holder = holder
        self.member = member
        self.resolve_memory = memory
        self.pidfd = pidfd
        self.uid: int | None = None  # of its user, as the kernel says; None: not known
        self.takes_segment = False  # whether its client can carry out collectives itself
        # Calls its argument, in another thread, with the places of its client's threads; None: they cannot be found
        # out.
        self.sample_stack: Callable[[Callable[[str], None]], None] | None = None
        self.redeem: Callable[[], None] = lambda: None  # ends what was set aside for its place in a segment
        self.completion_sink = outlet
        self.doorbell: socket.socket | None = None
        self.prepared: dict[int, PreparedCollective] = {}  # filled by the service's thread, read by the group loop
        self.prepared_sizes: dict[int, int] = {}  # bytes of their descriptions; `prepared_bytes` is their sum
        self.prepared_bytes = 0
        self.closed = False  # lost, left or hung up
        self._on_closed = closed
        self._outbox: deque[tuple[bytes, int]] = deque()  # message, descriptor to pass along or -1
        self._copies: set[int] = set()  # of those descriptors the ones that are closed once they are sent
        self.unread_bytes = 0
        self._outcomes: dict[int, list[bytes]] = {}
        self._p2p_outcomes: deque[int] = deque()

    def resolve_inputs(self, prepared: PreparedCollective, submission: messages.Submit) -> InputBuffers:
        """The memory of a submission; raises messages.MalformedMessage where it is out of bounds."""
        return InputBuffers(self.resolve_memory, prepared, submission, prepared.collective.contributes(self.rank))

    def attach_doorbell(self, doorbell: socket.socket) -> None:
        """Take the doorbell when the client has connected it."""
        doorbell.setblocking(False)
        self.doorbell = doorbell

    def send(self, message: bytes, descriptor: int = -1) -> bool:
        """Sends a message, or keeps it until the client reads; True where it is kept."""
        if self.completion_sink is not None:
            self.completion_sink.send(message)
            return False
        if self.doorbell is None and self.closed:
            return False
        if descriptor < 0 and not self._outbox and self.doorbell is not None:
            try:
                self.doorbell.send(message)
                return False
            except (BlockingIOError, *DISCONNECT_ERRORS):  # flush keeps it, or lets it go
                pass
        self._outbox.append((message, descriptor))
        self.unread_bytes += len(message)
        return self.flush()

    def lend(self, message: bytes, descriptor: int) -> bool:
        """The same with a descriptor that may be closed as soon as this returns.

        Raises:
            OSError: there are no descriptors for that.
        """
        if self.doorbell is None:
            return False
        if not self._outbox:
            try:
                socket.send_fds(self.doorbell, [message], [descriptor])
                return False
            except BlockingIOError:
                pass
            except DISCONNECT_ERRORS:  # its end of file is on its way
                return False
        copy = os.dup(descriptor)
        self._copies.add(copy)
        return self.send(message, copy)

    def flush(self) -> bool:
        """Sends what is waiting; True where something still does."""
        while self._outbox and self.doorbell is not None:
            message, descriptor = self._outbox[0]
            try:
                if descriptor >= 0:
                    socket.send_fds(self.doorbell, [message], [descriptor])
                else:
                    self.doorbell.send(message)
            except BlockingIOError:
                break
            except DISCONNECT_ERRORS:  # its end of file is on its way
                self._clear_outbox()
                return False
            except OSError:  # too many descriptors are on their way to this process: what is lent, it can do without
                if descriptor not in self._copies:
                    raise
            self._outbox.popleft()
            self.unread_bytes -= len(message)
            if descriptor in self._copies:
                self._copies.discard(descriptor)
                os.close(descriptor)
        return bool(self._outbox)

    def _clear_outbox(self) -> None:
        self._outbox.clear()
        self.unread_bytes = 0
        while self._copies:
            os.close(self._copies.pop())

    @property
    def unread_count(self) -> int:
        """Messages that wait for the client to read."""
        return len(self._outbox)

    @property
    def is_reading(self) -> bool:
        """Whether the client reads its messages; one that does not is not answered when it asks."""
        return not self._outbox

    @property
    def has_unread(self) -> bool:
        """Whether its client has yet to read a message, which is kept here or by the system."""
        if self._outbox or self.doorbell is None:
            return bool(self._outbox)
        taken: int = _INT.unpack(fcntl.ioctl(self.doorbell, termios.TIOCOUTQ, bytes(_INT.size)))[0]
        return taken > 0

    def record_outcome(self, instance: int, message: bytes) -> None:
        """Keep the message to this rank about an instance, so that a repeated submission gets it again."""
        known = self._outcomes.get(instance)
        if known is None:
            self._outcomes[instance] = [message]
        else:
            known.append(message)
        if instance < messages.P2P_BASE:
            self._outcomes.pop(instance - messages.MAX_OUTSTANDING, None)
            return
        self._p2p_outcomes.append(instance)  # in the order in which they end, which is not that of their numbers
        if len(self._p2p_outcomes) > messages.MAX_OUTSTANDING:
            self._outcomes.pop(self._p2p_outcomes.popleft(), None)

    def get_outcomes(self, instance: int) -> list[bytes]:
        return self._outcomes.get(instance, [])

    def clear_outcomes(self) -> None:
        """Forget what was told: a new generation begins."""
        self._outcomes.clear()
        self._p2p_outcomes.clear()

    def forget_prepared(self) -> None:
        """Nothing is submitted any more. Called in the service's thread, when the group loop has ended."""
        self.prepared.clear()
        self.prepared_sizes.clear()
        self.prepared_bytes = 0

    def redeem_pledge(self) -> None:
        """It is known whether it has a place in a segment; or it needs none any more."""
        redeem, self.redeem = self.redeem, lambda: None
        redeem()

    def close(self) -> None:
        self.redeem_pledge()
        closed, self._on_closed = self._on_closed, lambda: None
        self.closed = True
        self._clear_outbox()
        if self.completion_sink is not None:
            self.completion_sink.close()
        if self.doorbell is not None:
            self.doorbell.close()
            self.doorbell = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        closed()


class InputBuffers:
    """The memory of a submission. Bounds are checked at once; arrays are made when they are asked for.

    Attributes:
        output: where the result is to be written; None: in a result slot.
        is_stream_ordered: whether its rank goes on from there in stream order.
        keeps_own: whether its rank takes what this gives to the result from its own arrays.
        takes_parts: whether its rank takes parts of a result.
        may_lend: whether its rank could lend its arrays to a carrier. is_lent: whether it does so.
        is_on_device: whether any of it lies in the memory of a GPU. Then ask for `parts`, else for all the others.
    """

    def __init__(
        self,
        memory: MemoryResolver,
        prepared: PreparedCollective,
        submission: messages.Submit,
        contributes: bool = True,
    ) -> None:
        """Args:
        contributes: whether the value goes anywhere; else it need not be there.
        """
        self.prepared = prepared
        self.is_staged = submission.staged
        self.is_stream_ordered = submission.ordered
        self.keeps_own = submission.keeps_own and contributes
        self.takes_parts = submission.takes_parts
        self.may_lend = submission.lending == messages.SUBMIT_MAY_LEND
        self.is_lent = submission.lending == messages.SUBMIT_LENT
        self.output: Region | None = None
        self._parts: list[NDArray[np.uint8]]  # or Regions, where `is_on_device`
        look: Callable[[int, int, int], Any] = memory
        addresses = submission.addresses
        if submission.staged:
            if len(addresses) != 1:
                raise messages.MalformedMessage(f"a staged submission with {len(addresses)} addresses instead of 1")
            arena, offset = addresses[0]
            self._parts = [look(arena, offset, prepared.layout.staging_bytes)]
        else:
            sizes = prepared.leaf_bytes
            if not (addresses or contributes):
                sizes = ()
            if len(addresses) != len(sizes):
                raise messages.MalformedMessage(f"a submission with {len(addresses)} addresses for {len(sizes)} leaves")
            self._parts = [look(arena, offset, size) for size, (arena, offset) in zip(sizes, addresses, strict=True)]
        if submission.output is not None:
            output = memory(*submission.output, prepared.device_bytes)
            if not isinstance(output, Region):
                raise messages.MalformedMessage("a result that is to be written into memory of the host")
            self.output = output
        self.is_on_device = submission.output is not None or Region in map(type, self._parts)
        if self.is_on_device:
            self._check_devices(prepared)

    def _check_devices(self, prepared: PreparedCollective) -> None:
        gpus = set(map(_gpu_of, self._parts))
        if len(gpus) > 1 or len((gpus | {_gpu_of(self.output)}) - {None}) > 1:
            raise messages.MalformedMessage(f"{prepared.op} with a value that lies in several memories")
        widths = [_MAX_ITEMSIZE] if self.is_staged else [leaf.dtype.itemsize for leaf in prepared.collective.leaves]
        widths = widths if self._parts else []  # a rank without a part may still name a place for its result
        for part, width in zip([*self._parts, self.output], [*widths, _MAX_ITEMSIZE], strict=True):
            if isinstance(part, Region) and part.address % width:  # a kernel that reads it would end the GPU's context
                raise messages.MalformedMessage(
                    f"{prepared.op} with elements of {width} bytes at an address that is no multiple"
                )
        if not is_carried_on_gpus(prepared.collective):
            raise messages.MalformedMessage(f"{prepared.op} with a value in the memory of a GPU")

    def split_output(self) -> tuple[Region, ...]:
        """Where each leaf of a result of rows is to be written, in order of packs; () where that is not on a GPU."""
        rows, output = self.prepared.device_rows, self.output
        if rows is None or output is None:
            return ()
        return tuple(output[start:stop] for start, stop in zip(rows.offsets, rows.ends, strict=True))

    def parts(self, pack_number: int) -> list[tuple[int, HostOrGpuBytes]]:
        """(offset in the pack in elements, bytes): all of the pack where it lies side by side, else by leaf."""
        whole = self.contiguous_pack(pack_number)
        return [(0, whole)] if whole is not None else list(self.leaves(pack_number))

    def contiguous_pack(self, pack_number: int) -> NDArray[np.uint8] | None:
        """The bytes of a pack where they lie side by side, else None."""
        if self.is_staged:
            return self._parts[0][self.prepared.staging_slices[pack_number]]
        only = self.prepared.single_leaf[pack_number]
        return None if only is None else self._parts[only]

    def leaf(self, index: int) -> NDArray[np.uint8]:
        """The bytes of a leaf."""
        if not self.is_staged:
            return self._parts[index]
        place = self.prepared.layout.places[index]
        pack = self.prepared.layout.packs[place.pack]
        start = pack.staging_offset + place.offset * pack.dtype.itemsize
        return self._parts[0][start : start + self.prepared.leaf_bytes[index]]

    def leaves(self, pack_number: int) -> list[tuple[int, NDArray[np.uint8]]]:
        """(offset in the pack in elements, bytes) of every leaf of a pack."""
        layout = self.prepared.layout
        pack = layout.packs[pack_number]
        itemsize = pack.dtype.itemsize
        found: list[tuple[int, NDArray[np.uint8]]] = []
        for leaf, place in enumerate(layout.places):
            if place.pack != pack_number:
                continue
            if self.is_staged:
                start = pack.staging_offset + place.offset * itemsize
                found.append((place.offset, self._parts[0][start : start + self.prepared.leaf_bytes[leaf]]))
            else:
                found.append((place.offset, self._parts[leaf]))
        return found


def _gpu_of(memory: object) -> Gpu | None:
    return memory.gpu if isinstance(memory, Region) else None
