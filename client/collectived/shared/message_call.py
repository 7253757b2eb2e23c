"""Sends and receives of a rank that matches by itself, in a group of several workers; and messages not yet received."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from collectived.calls.buffers import ResultBuffer
from collectived.calls.prepare import PreparedCall
from collectived.shared.message_forms import (
    describe_value,
    make_form,
    parse_description,
    parse_short_description,
)
from collectived.shared.segment_call import LetterForm, PointToPointCall
from collectived.values import nest
from collectived.values.copying import copy_into
from collectived.values.leaves import Array
from collectived.values.new_arrays import make_array
from collectived_proto.ipc.rank_messages import MAX_DESCRIPTION, Header
from collectived_proto.ipc.result_header import Pieces, parse_header
from collectived_proto.types import Recv, Send

SHORT_BYTES = 256 << 10  # of a message that is sent, or taken, without a call
_SHORT_BYTES = 4096  # of a description
_KEPT_BYTES = 512  # of a message, beside its description and its value
_NO_BYTES = np.empty(0, np.uint8)
_BYTE = np.dtype(np.uint8)


class KeptMessage:
    """A message that no receive has asked for when it came.

    Args:
        memory: in which its leaves lie one behind the other.
        before: of its header, if it came over a link.

    Attributes:
        cost: bytes of this process that it takes.
    """

    def __init__(self, tag: int, description: bytes, memory: Array, before: int = 0) -> None:
        self.tag = tag
        self._before = before
        self.nbytes = len(memory)
        self.cost = _KEPT_BYTES + len(description) + len(memory)
        self.memory = memory
        self.description = description
        self._slot: ResultBuffer | None = None
        self._pieces: tuple[Pieces, ...] = ()

    @property
    def head(self) -> bytes:
        """Its header and its description, as they came over a link."""
        return Header(self.tag, len(self.description), self.nbytes, self._before).encode() + self.description

    @property
    def is_in_slot(self) -> bool:
        """Whether it lies in memory of the worker."""
        return self._slot is not None

    @classmethod
    def from_slot(cls, tag: int, slot: ResultBuffer) -> KeptMessage:
        """One that lies in a result slot, which is held until the message is dropped.

        Raises:
            ValueError: there is none.
        """
        header = parse_header(memoryview(slot.memory)[slot.offset :])
        message = cls(tag, header.description, _NO_BYTES)
        message._slot, message._pieces, message.cost = slot, header.leaves, 0
        return message

    def deliver(self, call: MessageCall) -> None:
        """Copy the value to where a receive takes it.

        Raises:
            ValueError: it is not what it says.
        """
        targets = call.begin_value(self.description)
        slot, self._slot = self._slot, None
        if slot is None:
            if call.nbytes != self.nbytes:
                raise ValueError(f"a message of {self.nbytes} bytes that describes {call.nbytes}")
            at = 0
            for target in targets:
                self._copy(target, self.memory, at)
                at += target.nbytes
            return
        for target, pieces in zip(targets, self._pieces, strict=True):
            if target.nbytes:
                self._copy(target, slot.memory, slot.offset + pieces[0][0])

    def _copy(self, target: Array, memory: Any, offset: int) -> None:
        if target.nbytes:
            copy_into(target.reshape(-1).view(np.uint8), np.ndarray((target.nbytes,), np.uint8, memory, offset))


class SendProgram:
    """A prepared send: what is the same each time."""

    def __init__(self, prepared: PreparedCall) -> None:
        operation = prepared.collective.operation
        assert isinstance(operation, Send)
        self.form = make_form(prepared.collective, sends=True)
        self.nbytes = sum(leaf.nbytes for leaf in prepared.collective.leaves)
        self._tag = operation.tag
        self._description = describe_value(prepared.collective)
        self._head: tuple[int, bytes] = (-1, b"")

    def make_head(self, before: int) -> bytes:
        known = self._head
        if known[0] != before:
            header = Header(self._tag, len(self._description), self.nbytes, before)
            self._head = known = before, header.encode() + self._description
        return known[1]

    @property
    def is_too_long(self) -> bool:
        return len(self._description) > MAX_DESCRIPTION


class MessageCall(PointToPointCall):
    """
    Attributes:
        is_matched: of a receive: whether its message is there, or comes.
        is_late: whether its time is over here.
        nbytes: of its value.
    """

    __slots__ = ("is_late", "is_matched", "nbytes")

    def __init__(self, prepared: PreparedCall, arrays: list[Array], spec: nest.Spec) -> None:
        super().__init__(prepared, arrays, spec)
        self.is_late = self.is_matched = False
        self.nbytes = 0

    @property
    def peer(self) -> int:
        operation = self.prepared.collective.operation
        assert isinstance(operation, (Send, Recv))
        return operation.to if isinstance(operation, Send) else operation.source

    @property
    def sender(self) -> int:
        """Of a receive that is matched: the rank whose message it takes."""
        return self.peer if self.source is None else self.source

    @property
    def is_running(self) -> bool:
        return not self.complete

    @property
    def expires_here(self) -> bool:
        return self.prepared.receives and (not self.is_async or self.is_late)  # else no thread may look at the time

    def begin_send(self, before: int) -> list[Any]:
        """The buffers to be sent, behind so many messages that went by the worker."""
        program = _get_program(self.prepared)
        inputs, _ = self.make_buffers(program.form)
        self.nbytes = program.nbytes
        return [program.make_head(before), *(view_bytes(leaf) for leaf in inputs if leaf.nbytes)]

    def begin_value(self, description: bytes) -> tuple[Array, ...]:
        """The arrays for the leaves of a value that has come, or comes.

        Raises:
            ValueError: these bytes describe none.
        """
        is_short = len(description) <= _SHORT_BYTES
        form: LetterForm = (parse_short_description if is_short else parse_description)(description)
        targets = self.make_buffers(form)[1]
        self.nbytes = sum(target.nbytes for target in targets)
        return targets


def make_short_value(message: KeptMessage, out: Any) -> Any:
    """The value of a message that is one array, in `out` if that is one of NumPy's that takes it; else None."""
    if message.is_in_slot or message.nbytes > SHORT_BYTES or len(message.description) > _SHORT_BYTES:
        return None
    try:
        form = parse_short_description(message.description)
    except ValueError:  # its call says so
        return None
    if not form.is_single:
        return None
    dtype, shape = form.schedule.results[0]
    memory = message.memory
    if memory.nbytes != math.prod(shape) * dtype.itemsize:
        return None
    if out is None:
        return memory.view(dtype).reshape(shape) if shape and memory.nbytes else None
    if not may_be_filled(out) or out.dtype != dtype or out.shape != shape:
        return None
    copy_into(out.reshape(-1).view(np.uint8), memory)
    return out


def may_be_filled(out: Any) -> bool:
    """Whether bytes can be copied into an array as they come."""
    return type(out) is np.ndarray and out.flags.c_contiguous and out.flags.writeable


def may_send(prepared: PreparedCall) -> bool:
    """Whether the value of a prepared send can go over a rank link: not one with millions of leaves."""
    return not _get_program(prepared).is_too_long


def _get_program(prepared: PreparedCall) -> SendProgram:
    program = prepared.segment_program
    if not isinstance(program, SendProgram):
        program = prepared.segment_program = SendProgram(prepared)
    return program


def measure_kept(header: Header) -> int:
    """The `cost` of a message that is to be kept."""
    return _KEPT_BYTES + header.described + header.nbytes


def make_memory(nbytes: int) -> Array:
    """Memory for a message that no receive has asked for."""
    return make_array((nbytes,), _BYTE)


def view_bytes(array: Array) -> memoryview:
    """The bytes of an array that lie side by side."""
    return (array if array.ndim == 1 else array.reshape(-1)).view(np.uint8).data
