"""A call that the ranks of one host carry out by themselves, from and to arrays of the caller's process."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import numpy as np

from collectived.arguments import escape_surrogates
from collectived.calls.buffers import ResultBuffer
from collectived.calls.call import Call
from collectived.calls.described_call import UNKNOWN_KIND, DescribedCall, parse_structure
from collectived.calls.prepare import PreparedCall
from collectived.calls.timeout import DEADLINE_GRACE
from collectived.errors import InternalError
from collectived.shared.segment_plan import Schedule
from collectived.shared.segment_program import SegmentProgram, Variant
from collectived.values import axes, nest
from collectived.values.copying import copy_of
from collectived.values.leaves import Array
from collectived.values.new_arrays import make_array
from collectived.values.spans import Spans
from collectived.values.targets import Targets, check_fits
from collectived_native import core
from collectived_proto.cause import Cause
from collectived_proto.types import AllToAll, AxisOperation, Collective

STOP_NANOSECONDS = 50_000_000  # in which the core lets go of memory after the end of a call


class LetterForm(NamedTuple):
    """The content of a letter, as `Variant` describes that of a collective. `is_single`: one array by itself."""

    schedule: Schedule
    collective: Collective
    is_single: bool


Form = Variant | LetterForm


class SegmentCall(Call):
    """
    Attributes:
        job: the native core's, while it runs and until its end has been seen.
        is_asked: whether the worker has been asked why it fails.
    """

    is_staged = False
    __slots__ = ("__weakref__", "_inputs", "_results", "_told", "_variant", "is_asked", "job")

    def __init__(self, prepared: PreparedCall, arrays: list[Array], spec: nest.Spec) -> None:
        super().__init__(prepared, arrays, None, spec)
        self.job: core.Job | None = None
        self.is_asked = False
        self._variant: Form | None = None
        self._told: Call | None = None  # which has the result, where that comes by the doorbell
        self._inputs: tuple[Array, ...] = ()
        self._results: list[Array] = []

    def set_deadline(self, at: float) -> None:
        self.cutoff = at + DEADLINE_GRACE  # before that the core watches it

    def begin_patience(self, now: float) -> None:
        """The core waits no longer, for a group of several workers: its own is to say why."""
        if self.cutoff != math.inf:
            super().set_deadline(self.cutoff - DEADLINE_GRACE)
            self.begin_wait(now)

    def is_overdue(self, now: float) -> bool:
        return now >= self.cutoff if self._patience is None else super().is_overdue(now)

    @property
    def is_out_intact(self) -> bool:
        if self.out is None or self.verdict is None:
            return True
        if self.verdict.cause is Cause.MISMATCH and not self.prepared.is_p2p:
            return True  # contracts are compared before anything is delivered
        return not any(view is result for view, result in zip(self.out.views, self._results, strict=False))

    def make_buffers(self, variant: Form) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Return inputs and outputs in the order of a variant's phases; outputs are made, or are those of `out`."""
        self._variant = variant
        self._results = self._make_results(variant)
        given = variant.schedule.inputs
        if not self._inputs:
            self._inputs = tuple([self._make_input(leaf) for leaf in given])
            self.arrays = []
        if self.out is not None and self._inputs:
            self._keep_apart(variant)
        return self._inputs, tuple([self._results[leaf] for leaf in variant.schedule.outputs])

    @property
    def form(self) -> Form | None:
        """The form of its result, or of its input."""
        return self._variant

    def attach_result(self, slot: ResultBuffer) -> None:
        super().attach_result(slot)
        kind = Call if self.prepared.result_spec is None else DescribedCall
        self._told = kind(self.prepared, [], None, self.spec)
        self._told.out = self.out
        self._told.attach_result(slot)

    def describe(self, job: core.Job) -> None:
        """Go on with the lengths or structure that others have published.

        Raises:
            ValueError: no honest rank publishes that.
        """
        program = self.prepared.segment_program
        assert isinstance(program, SegmentProgram)
        variant = program.describe(job.blobs())
        job.describe(variant.plan, *self.make_buffers(variant))

    def adopt_buffers(self, variant: Form, results: list[Array]) -> None:
        """Take the arrays with which this call has been started already."""
        self._variant, self._results = variant, results
        self._inputs, self.arrays = tuple([self.arrays[leaf] for leaf in variant.schedule.inputs]), []

    def _make_input(self, leaf: int) -> Array:
        array = self.arrays[leaf]
        if not array.dtype.isnative:
            return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        if self.is_async and not self.is_lent and self.prepared.memory.locate(array) is None:
            return copy_of(array)
        return np.ascontiguousarray(array) if array.ndim else array

    def _keep_apart(self, variant: Form) -> None:
        """Make those results anew that would be written over inputs while these are still read.

        Inputs stay where they are: other ranks may know their addresses.
        """
        spans = Spans(dict(zip(variant.schedule.inputs, self._inputs, strict=True)))
        for leaf in variant.schedule.outputs:
            result = self._results[leaf]
            over = spans.find_overlapping(result)
            if over and not (over == [leaf] and self.may_write_over and spans.is_same(leaf, result)):
                self._results[leaf] = make_array(result.shape, result.dtype)

    @property
    def may_write_over(self) -> bool:
        """Whether a result may take the place of its input while that is still read: both are laid out alike."""
        operation = self.prepared.collective.operation
        return not (isinstance(operation, AllToAll) and operation.sizes)

    def _make_results(self, variant: Form) -> list[Array]:
        """Arrays for the leaves of the result as they travel; those of `out` where it takes them as they are."""
        targets = self.out
        if targets is not None:
            with contextlib.suppress(ValueError):  # raised when the result is asked for
                self._check_out(targets, variant)
                rows_first = self.has_rows_first
                return [
                    view if rows_first and view.flags.c_contiguous and view.dtype == dtype else make_array(shape, dtype)
                    for view, (dtype, shape) in zip(targets.views, variant.schedule.results, strict=True)
                ]
        return [make_array(shape, dtype) for dtype, shape in variant.schedule.results]

    @property
    def has_rows_first(self) -> bool:
        """Whether arrays travel as the caller has them, rather than with another axis first."""
        return not self._axis

    @property
    def _axis(self) -> int:
        operation = self.prepared.collective.operation
        return operation.axis if isinstance(operation, AxisOperation) else 0

    def _check_out(self, out: Targets, variant: Form) -> None:
        axis = self._axis
        types = [
            (dtype, axes.restore_shape(shape, axis) if axis else shape) for dtype, shape in variant.schedule.results
        ]
        check_fits(out, escape_surrogates(variant.collective.structure), types)

    @property
    def is_running(self) -> bool:
        """Whether it still waits for the other ranks, or has to be described by what they published."""
        job = self.job
        return job is not None and job.state() in (core.PENDING, core.DESCRIBE)

    def await_release(self) -> None:
        """Of a call that has failed: wait until the core reads and writes nothing of the caller's any more."""
        job = self.job
        if self.verdict is not None and job is not None:
            job.wait(STOP_NANOSECONDS)

    def count_packs(self) -> None:
        """Say which packs are complete."""
        job, packs = self.job, self.prepared.pack_count
        done = packs if job is None or job.state() == core.COMPLETE else job.phases_done()
        if not self.prepared.accepts_any or done == packs:
            self.completed_packs.extend(range(len(self.completed_packs), min(done, packs)))

    def take_value(self) -> Any:
        if not self.prepared.receives:
            return None
        if self._told is not None:
            self._let_go()
            return self._told.take_value()
        variant = self._require_variant()
        if self.out is not None:
            self._check_out(self.out, variant)
            self.take_leaves()
            return self.out.whole
        if not self.prepared.accepts_any:
            return nest.unflatten(self.spec, self.take_leaves())
        spec = self._parse_structure(variant)
        return nest.unflatten(spec, self.take_leaves())

    def copy_to_out(self) -> None:
        if self._told is not None:
            self._told.copy_to_out()
        elif self.out is not None and self._variant is not None and self.verdict is None:
            with contextlib.suppress(ValueError):
                self._check_out(self.out, self._variant)
                self._build_leaves()

    def take_leaves(self) -> list[Any]:
        if self._told is not None:
            self._let_go()
            return self._told.take_leaves()
        leaves = self._build_leaves() if self.prepared.receives else []
        self._results = []
        return leaves

    def get_pack_leaves(self, pack: int) -> list[tuple[nest.KeyPath, Any]]:
        if not self.prepared.receives:
            return []
        if self._told is not None:
            return self._told.get_pack_leaves(pack)
        variant = self._require_variant()
        if self.out is not None:
            self._check_out(self.out, variant)
        if not self.prepared.accepts_any:
            paths = nest.key_paths(self.spec)
            return [(paths[index], self._get_leaf(index)) for index in variant.schedule.packs[pack]]
        paths = nest.key_paths(self._parse_structure(variant) if self.out is None else self.out.spec)
        return [(path, self._get_leaf(index)) for index, path in reversed(list(enumerate(paths)))]

    def _parse_structure(self, variant: Form) -> nest.Spec:
        return parse_structure(self.prepared.op, variant.collective.structure, len(self._results))

    def _require_variant(self) -> Form:
        if self._variant is None:
            raise InternalError(f"{self.prepared.op} has no result")  # the channel lets no such call end well
        return self._variant

    def _build_leaves(self) -> list[Any]:
        return [self._get_leaf(index) for index in range(len(self._results))]

    def _build_leaf(self, index: int) -> Any:
        result = axes.restore_axis(self._results[index], self._axis)
        if self.out is not None:
            view = self.out.views[index]
            if view is not self._results[index]:
                view[...] = result
            return self.out.leaves[index]
        kind = UNKNOWN_KIND if self.prepared.accepts_any else self.prepared.kinds[index]
        return kind.restore(np.ascontiguousarray(result) if self._axis else result)


class PointToPointCall(SegmentCall):
    """A send or receive that a rank carries out by itself, and its worker watches once it has waited for a while.

    Attributes:
        is_announced: whether the worker knows that it waits.
        began: when it was seen first that it does.
    """

    __slots__ = ("began", "is_announced")

    def __init__(self, prepared: PreparedCall, arrays: list[Array], spec: nest.Spec) -> None:
        super().__init__(prepared, arrays, spec)
        self.is_announced = False
        self.began = 0.0

    @property
    def expires_here(self) -> bool:
        """Whether this process ends it at its deadline, rather than the worker."""
        return False
