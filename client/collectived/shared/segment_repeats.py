"""Blocking calls that a line of the caller's has made before, in a segment: the native core runs them again at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from collectived import call_site
from collectived.calls.call import Call
from collectived.calls.channel import NOT_REPEATED
from collectived.calls.prepare import ANY_VALUE, PreparedCall, may_be_repeated
from collectived.calls.rank_state import RankState
from collectived.shared.segment_call import Form, SegmentCall
from collectived.shared.segment_letters import LetterCall, LetterProgram
from collectived.shared.segment_program import SegmentProgram, Variant
from collectived.values import nest
from collectived.values.leaves import ARRAY, Array, ArrayKind, is_host_array, kind_of, writable_view
from collectived.values.new_arrays import MIN_KEPT_BYTES, make_large_array
from collectived.values.targets import Targets
from collectived_native import core
from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import Operation

RUN_SECONDS = 0.02  # for which the core waits before it hands a call back
_NO_RESULT = None, (), 0

Unfinished: TypeAlias = "tuple[Repeat, Form | None, Any, Array | None, core.Job]"


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """A call of one array, of a list of NumPy's arrays, or of none, that may be run again.

    Attributes:
        kind: of the value and the result.
        nanoseconds: that its caller gives it; 0: any.
        spec: of a list; None: it is none.
    """

    program: SegmentProgram | LetterProgram
    prepared: PreparedCall
    kind: ArrayKind
    nanoseconds: int
    spec: nest.Spec | None = None

    def see(self, value: Any, out: Any) -> tuple[Array, Array | None] | None:
        """Return value and `out` as arrays of NumPy's that look into them; None where they cannot be seen so."""
        try:
            target = None if out is None else writable_view(out)
            if not is_host_array(value):
                return None
            return (target if target is not None and out is value else self.kind.to_array(value)), target
        except (TypeError, ValueError):  # the long way says why
            return None

    def make_call(self, form: Form | None, value: Any, result: Any, out: Any) -> SegmentCall:
        """Return a call of what the core has begun, and has not finished.

        Args:
            form: of the value or result, as far as it is known. value: as an array of NumPy's, if it is an array;
            the parts of a list that the core reads. result: where the core puts it: an array, or a list of arrays.
        """
        arrays: list[Array] = value if self.spec else [value] if isinstance(value, np.ndarray) else []
        spec = self.spec or (nest.LEAF if arrays else nest.NONE if value is None else nest.ANY)
        call = (LetterCall if self.prepared.is_p2p else SegmentCall)(self.prepared, arrays, spec)
        results: list[Array] = [] if result is None else result if self.spec else [result]
        if out is not None and result is not None:
            call.out = Targets(out, self.spec or nest.LEAF, results if self.spec else [out], results)
        elif out is not None and self.prepared.receives:
            call.set_out(out)
        if self.nanoseconds:
            call.timeout = self.nanoseconds / 1e9
            call.set_deadline(monotonic() + call.timeout - RUN_SECONDS)
        if form is None:
            assert isinstance(self.program, SegmentProgram)
            form = self.program.first
        call.adopt_buffers(form, results)
        return call


class Repeats:
    """Those of one rank.

    Args:
        numbers: of its sends and receives.
    """

    def __init__(self, state: RankState, numbers: Iterator[int]) -> None:
        self._core = core.repeats(
            np.ndarray, np.empty, make_large_array, MIN_KEPT_BYTES, ANY_VALUE, NOT_REPEATED, state, numbers
        )
        self.run = self._core.run

    def add(self, call: Call, operation: Operation, value: Any, frame: FrameType) -> None:
        """Remember a call that has ended well, if it may be run again.

        Args:
            frame: the one that called the collective; frames of this library may lie between it and the caller's.
        """
        program, own = call.prepared.segment_program, call_site.list_own(frame)
        if not isinstance(call, SegmentCall) or own is None:
            return
        is_list = type(value) is list
        is_array = value is not ANY_VALUE and value is not None and not is_list
        arrays = list(value) if is_list else [value] if is_array else []
        if not may_be_repeated(value) or not all(getattr(one.dtype, "isnative", True) for one in arrays):
            return  # another thread has changed the list; or it is of foreign byte order, which no tensor of PyTorch is
        known = None
        if isinstance(program, SegmentProgram):
            known = _describe_collective(call, program, is_array, is_list)
        elif isinstance(program, LetterProgram) and not is_list:
            known = _describe_letter(program)
        if known is None:
            return
        kind = kind_of(value) if is_array else ARRAY
        spec = call.spec if is_list else None
        repeat = Repeat(known.program, call.prepared, kind, int(call.timeout * 1e9), spec)
        see, restore = (None, None) if kind is ARRAY else (repeat.see, kind.restore)
        terms = repeat, see, restore, known.program.engine, call.generation, *known.terms, repeat.nanoseconds
        self._core.add(operation, value, frame, own, terms, known.form, known.parts)


Parts: TypeAlias = "tuple[core.Part, ...]"


class _Known(NamedTuple):
    """The data of a call that the core needs.

    Attributes:
        terms: kind, peer, tag, plan, whether it takes what comes, and blob.
        parts: the arrays of a list: those that go in, and that come out, in the order of the plan; and those that only
            say what comes.
    """

    program: SegmentProgram | LetterProgram
    terms: tuple[int, int, int, core.Plan | None, bool, bytes | None]
    form: core.Form
    parts: tuple[Parts, Parts, Parts] | None = None


def _describe_collective(call: SegmentCall, program: SegmentProgram, is_array: bool, is_list: bool) -> _Known | None:
    """None where the core could not take the value, or the result, as it is."""
    first, form, is_open = program.first, call.form, call.prepared.accepts_any
    terms = core.COLLECTIVE, 0, 0, first.plan, is_open, program.blob
    if is_open:
        if not isinstance(form, Variant) or form is first or form.collective.structure != nest.LEAF:
            return None
        return _Known(program, terms, _make_form(form, form.blob, form.plan)) if form.schedule.outputs else None
    if not (call.has_rows_first and call.may_write_over):
        return None
    if is_list:
        if any(len(leaf.shape) > core.MAX_AXES for leaf in first.collective.leaves):
            return None
        return _Known(program, terms, (first, first.plan, None, *_NO_RESULT), _list_parts(first, call.prepared))
    if not is_array and (first.schedule.inputs or first.schedule.results):
        return None
    return _Known(program, terms, _make_form(first, None, first.plan))


def _list_parts(first: Variant, prepared: PreparedCall) -> tuple[Parts, Parts, Parts]:
    schedule, leaves = first.schedule, prepared.collective.leaves
    given = [(number, to_numpy(leaf.dtype), leaf.shape, leaf.nbytes) for number, leaf in enumerate(leaves)]
    got = []
    for leaf in schedule.outputs:
        dtype, shape = schedule.results[leaf]
        got.append((leaf, dtype, shape, dtype.itemsize * math.prod(shape)))
    others = [part for part in given if part[0] not in schedule.inputs]
    return tuple(given[leaf] for leaf in schedule.inputs), tuple(got), tuple(others)


def _describe_letter(program: LetterProgram) -> _Known | None:
    if program.known is None or program.preface:
        return None
    form, blob = program.known
    if not (program.sends or form.is_single):
        return None
    terms = core.SEND if program.sends else core.RECEIVE, program.peer, program.tag, None, False, None
    return _Known(program, terms, _make_form(form, blob, None))


def _make_form(form: Form, blob: bytes | None, plan: core.Plan | None) -> core.Form:
    if not form.schedule.outputs:
        return form, plan, blob, *_NO_RESULT
    dtype, shape = form.schedule.results[0]
    return form, plan, blob, dtype, shape, dtype.itemsize * math.prod(shape)
