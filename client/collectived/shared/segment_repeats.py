"""Blocking calls that a line of the caller's has made before, in a segment: run again without going the long way."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from types import CodeType, FrameType
from typing import Any

import numpy as np

from collectived.calls.call import Call
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
_RUN_NANOSECONDS = int(RUN_SECONDS * 1e9)
_MAX_REPEATS = 2048


@dataclass(slots=True, eq=False)
class Repeat:
    """A call of one array, or of none, that is ready to be run again.

    Attributes:
        code: keeps the caller's code alive, for its identity is part of the key.
        result: dtype and shape of the result of a collective; None where this rank receives none, or cannot know.
        kind: of the value and the result.
        is_open: whether this rank takes what its root sends.
    """

    code: CodeType
    generation: int
    program: SegmentProgram | LetterProgram
    prepared: PreparedCall
    nanoseconds: int
    result: tuple[np.dtype[Any], tuple[int, ...]] | None
    kind: ArrayKind
    is_open: bool

    def see(self, value: Any, out: Any) -> tuple[Any, Any] | None:
        """Return value and `out` as arrays of NumPy's that look into them; None where they cannot be seen so."""
        try:
            target = None if out is None else writable_view(out)
            return (target if out is value else self.kind.to_array(value)), target
        except (TypeError, ValueError):  # the long way says why
            return None

    def run(self, value: Any, out: Any) -> tuple[Any, Array | None, Form, core.Job | None] | None:
        """Run it with arrays of NumPy's; None where these cannot be taken as they are.

        Returns:
            The result, the array in which it lies, how that came, and the job of a call that has not
            completed at once.
        """
        program = self.program
        if isinstance(program, LetterProgram):
            return self._run_letter(program, value, out)
        if self.is_open:
            return self._run_open(program, out)
        first, into = program.first, None
        if self.result is not None and (into := _find_result(self.result, out)) is None:
            return None
        inputs, outputs = (value,) if first.schedule.inputs else (), () if into is None else (into,)
        job = program.engine.repeat(first.plan, inputs, outputs, self.nanoseconds, program.blob)
        return None if job is False else (into, into, first, job)

    def _run_open(self, program: SegmentProgram, out: Any) -> tuple[Any, Array | None, Form, core.Job | None] | None:
        """Take what comes, if it is one array as has come before; else the call that is made of the job takes it."""
        first = program.first
        if out is not None and not (type(out) is np.ndarray and out.flags.writeable):
            return None
        job = program.engine.run(first.plan, (), (), self.nanoseconds, program.blob)
        if job is None or job.state() != core.DESCRIBE:
            return None, None, first, job
        known = program.find_known(job.blobs())
        if known is None or known.collective.structure != nest.LEAF or not known.schedule.outputs:
            return None, None, first, job
        into = _find_result(known.schedule.results[0], out)
        if into is None or not into.flags.c_contiguous:
            return None, None, first, job
        job.describe(known.plan, (), (into,))
        is_complete = job.wait(_RUN_NANOSECONDS) == core.COMPLETE
        result = into if into.ndim or out is not None else into[()]
        return result, into, known, None if is_complete else job

    def _run_letter(
        self, program: LetterProgram, value: Any, out: Any
    ) -> tuple[Any, Array | None, Form, core.Job | None] | None:
        if program.known is None:
            return None
        form, blob = program.known
        if program.sends:
            if not value.flags.c_contiguous:
                return None
            return None, None, form, program.engine.send(program.peer, program.tag, (value,), 0, blob, core.BLOCKING)
        into = _find_result(form.schedule.results[0], out) if form.is_single else None
        if into is None or not (into.flags.c_contiguous and into.flags.writeable):
            return None
        job = program.engine.receive(program.peer, program.tag, (into,), self.nanoseconds, blob, core.BLOCKING)
        return into if into.ndim or out is not None or job is not None else into[()], into, form, job

    def restore(self, result: Any, out: Any) -> Any:
        """Return what the caller is given."""
        if self.kind is ARRAY or result is None:
            return result
        return self.kind.restore(result) if out is None else out

    def make_call(self, value: Any, out: Any, result: Array | None, form: Form) -> SegmentCall:
        """Return a call of what did not complete at once."""
        arrays: list[Array] = [value] if isinstance(value, np.ndarray) else []
        spec = nest.LEAF if arrays else nest.NONE if value is None else nest.ANY
        call = (LetterCall if self.prepared.is_p2p else SegmentCall)(self.prepared, arrays, spec)
        if out is not None and result is not None:
            call.out = Targets(out, nest.LEAF, [out], [result])
        elif out is not None and self.prepared.receives:
            call.set_out(out)
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

    def add(self, call: Call, operation: Operation, value: Any, frame: FrameType) -> None:
        """Remember a call that has ended well, if it may be run again."""
        program = call.prepared.segment_program
        if not isinstance(call, SegmentCall):
            return
        result = None
        is_array = value is not ANY_VALUE and value is not None
        kind = kind_of(value) if is_array else ARRAY
        if isinstance(program, SegmentProgram):
            if not (call.has_rows_first and call.may_write_over and (not is_array or _is_native(value))):
                return  # the core could not take such a value as it is
            if not is_array and (program.first.schedule.inputs or program.first.schedule.results):
                return
            schedule = program.first.schedule
            result = schedule.results[0] if schedule.outputs else None
        else:
            if not isinstance(program, LetterProgram) or program.preface or not _is_native(value):
                return
        if len(self._known) >= _MAX_REPEATS:
            self._known.clear()
        nanoseconds = int(call.timeout * 1e9)
        self._known[_make_key(operation, value, frame)] = Repeat(
            frame.f_code, call.generation, program, call.prepared, nanoseconds, result, kind, call.prepared.accepts_any
        )


def _find_result(result: tuple[np.dtype[Any], tuple[int, ...]], out: Any) -> Array | None:
    """The array for the result, `out` where it takes that as it is; None where it does not."""
    dtype, shape = result
    if out is None:
        return np.empty(shape, dtype)
    found: Array = out
    return found if type(out) is np.ndarray and out.dtype == dtype and out.shape == shape else None


def _make_key(operation: Operation, value: Any, frame: FrameType) -> tuple[Any, ...]:
    """Of a call: its line, and what the value is to the contract, and to the caller."""
    if value is ANY_VALUE or value is None:
        return operation, value is None, id(frame.f_code), frame.f_lasti
    return operation, type(value), value.dtype, value.shape, id(frame.f_code), frame.f_lasti


def _is_native(value: Any) -> bool:
    """Whether elements have this machine's byte order; tensors of PyTorch have no other."""
    return value is ANY_VALUE or value is None or getattr(value.dtype, "isnative", True)
