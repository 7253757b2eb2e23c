"""Blocking calls that a line of the caller's has made before, in a segment: run again without going the long way."""

from __future__ import annotations

from time import monotonic
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from collectived.calls.call import Call
from collectived.calls.channel import NOT_REPEATED
from collectived.calls.prepare import ANY_VALUE, PreparedCall
from collectived.shared.segment_call import Form, SegmentCall
from collectived.shared.segment_letters import LetterCall, LetterProgram
from collectived.shared.segment_program import SegmentProgram
from collectived.values import nest
from collectived.values.leaves import ARRAY, Array, ArrayKind, kind_of, writable_view
from collectived.values.targets import Targets
from collectived_native import core
from collectived_proto.types import Operation

RUN_SECONDS = 0.02  # for which the core waits before it hands a call back
_MAX_REPEATS = 2048


class Repeat(NamedTuple):
    """A call of one array, or a receive, that is ready to be run again.

    Attributes:
        code: keeps the caller's code alive, for its identity is part of the key.
        result: dtype and shape of the result of a collective; None where this rank receives none.
        kind: of the value and the result.
    """

    code: CodeType
    generation: int
    program: SegmentProgram | LetterProgram
    prepared: PreparedCall
    nanoseconds: int
    result: tuple[np.dtype[Any], tuple[int, ...]] | None
    kind: ArrayKind

    def see(self, value: Any, out: Any) -> tuple[Any, Any] | None:
        """Return value and `out` as arrays of NumPy's that look into them; None where they cannot be seen so."""
        if self.kind is ARRAY:
            return value, out
        try:
            target = None if out is None else writable_view(out)
            return (target if out is value else self.kind.to_array(value)), target
        except (TypeError, ValueError):  # the long way says why
            return None

    def run(self, value: Any, out: Any) -> tuple[Any, Array | None, Form, core.Job | None] | None:
        """Run it with what `see` returns; None where these cannot be taken as they are.

        Returns:
            The result, the array in which it lies, how that came, and the job of a call that has not
            completed at once.
        """
        program = self.program
        if value is not ANY_VALUE and not value.flags.c_contiguous:
            return None
        if isinstance(program, SegmentProgram):
            into = self._find_result(self.result, value, out)
            if into is NOT_REPEATED:
                return None
            first = program.first
            inputs, outputs = (value,) if first.schedule.inputs else (), () if into is None else (into,)
            return into, into, first, program.engine.run(first.plan, inputs, outputs, self.nanoseconds, program.blob)
        if program.known is None:
            return None
        form, blob = program.known
        if program.sends:
            return None, None, form, program.engine.send(program.peer, program.tag, (value,), 0, blob, core.BLOCKING)
        if not form.is_single:
            return None
        into = self._find_result(form.schedule.results[0], None, out)
        if into is NOT_REPEATED:
            return None
        job = program.engine.receive(program.peer, program.tag, (into,), self.nanoseconds, blob, core.BLOCKING)
        return into if into.ndim or out is not None or job is not None else into[()], into, form, job

    def _find_result(self, result: tuple[np.dtype[Any], tuple[int, ...]] | None, value: Array | None, out: Any) -> Any:
        """The array for the result, `out` where it takes that straight."""
        if result is None:
            return None if out is None else NOT_REPEATED
        dtype, shape = result
        if out is None:
            return np.empty(shape, dtype)
        if type(out) is not np.ndarray or out.dtype != dtype or out.shape != shape:
            return NOT_REPEATED
        if not (out.flags.c_contiguous and out.flags.writeable):
            return NOT_REPEATED
        return out if value is None or out is value or not np.may_share_memory(out, value) else NOT_REPEATED

    def restore(self, result: Any, out: Any) -> Any:
        """Return what the caller is given."""
        if self.kind is ARRAY or result is None:
            return result
        return self.kind.restore(result) if out is None else out

    def make_call(self, value: Any, out: Any, result: Array | None, form: Form) -> SegmentCall:
        """Return a call of what did not complete at once."""
        arrays, spec = ([], nest.ANY) if value is ANY_VALUE else ([value], nest.LEAF)
        call = (LetterCall if self.prepared.is_p2p else SegmentCall)(self.prepared, arrays, spec)
        if out is not None and result is not None:
            call.out = Targets(out, nest.LEAF, [out], [result])
        if self.nanoseconds:
            call.timeout = self.nanoseconds / 1e9
            call.set_deadline(monotonic() + call.timeout - RUN_SECONDS)
        call.adopt_buffers(form, [] if result is None else [result])
        return call


class Repeats:
    """Those of one rank, by operation, type and shape, and the caller's line."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Repeat] = {}

    def find(self, operation: Operation, value: Any, frame: FrameType) -> Repeat | None:
        return self._known.get(_make_key(operation, value, frame))

    def add(self, call: Call, operation: Operation, value: Any, frame: FrameType, timeout: float | None) -> None:
        """Remember a call that has ended well, if it may be run again."""
        program = call.prepared.segment_program
        if not isinstance(call, SegmentCall):
            return
        result = None
        kind = ARRAY if value is ANY_VALUE else kind_of(value)
        if isinstance(program, SegmentProgram):
            if value is ANY_VALUE or not (_is_native(value) and call.has_rows_first and call.may_write_over):
                return  # the core could not take such a value as it is
            schedule = program.first.schedule
            result = schedule.results[0] if schedule.outputs else None
        else:
            if not isinstance(program, LetterProgram) or program.preface or not _is_native(value):
                return
        if len(self._known) >= _MAX_REPEATS:
            self._known.clear()
        nanoseconds = int((timeout or 0.0) * 1e9)
        self._known[_make_key(operation, value, frame)] = Repeat(
            frame.f_code, call.generation, program, call.prepared, nanoseconds, result, kind
        )


def _make_key(operation: Operation, value: Any, frame: FrameType) -> tuple[Any, ...]:
    """Of a call: its line, and what the value is to the contract, and to the caller."""
    if value is ANY_VALUE:
        return operation, id(frame.f_code), frame.f_lasti
    return operation, type(value), value.dtype, value.shape, id(frame.f_code), frame.f_lasti


def _is_native(value: Any) -> bool:
    """Whether elements have this machine's byte order; tensors of PyTorch have no other."""
    return value is ANY_VALUE or getattr(value.dtype, "isnative", True)
