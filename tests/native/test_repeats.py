"""Blocking calls of one array that the core remembers and runs again."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from types import CodeType, FrameType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.native.ranks import Array, as_threads, finish, make_plan

from collectived_native import core
from collectived_proto.types import DType

F32, I64 = int(DType.FLOAT32), int(DType.INT64)
OPERATION, OTHER_OPERATION = "an operation", "another one"
ANY, ABSENT = object(), object()


@dataclass
class Standing:
    """As `RankState` of the client says it."""

    generation: int = 7
    verdict: object = None
    waiting: int = -1


LARGE_BYTES = 4096  # of a result, from which on it is made apart


@dataclass
class Ours:
    """What one rank remembers, and a call of it."""

    engine: core.Engine
    standing: Standing = field(default_factory=Standing)
    numbers: Iterator[int] = field(default_factory=count)
    made: list[tuple[int, ...]] = field(default_factory=list)  # shapes of results that were made
    made_large: list[tuple[int, ...]] = field(default_factory=list)
    handed_over: int = 0
    unknown: int = 0

    def __post_init__(self) -> None:
        def make(shape: tuple[int, ...], dtype: Any) -> Array:
            self.made.append(shape)
            return np.empty(shape, dtype)

        def make_large(shape: tuple[int, ...], dtype: Any) -> Array:
            self.made_large.append(shape)
            return np.empty(shape, dtype)

        terms = np.ndarray, make, make_large, LARGE_BYTES, ANY, ABSENT, self.standing, self.numbers
        self.repeats = core.repeats(*terms)

    def run(self, value: Any, out: Any = None, operation: str = OPERATION, frame: FrameType | None = None) -> Any:
        return self.repeats.run(operation, value, out, frame or LINE)

    def take(self, value: Any, out: Any = None, like: Any = None, plan: core.Plan | None = None) -> Any:
        """The result, also of what is not known, or has waited for long, and is handed over: of the kind of `like`."""
        result = self.run(value, out)
        if not isinstance(result, tuple):
            return result
        _call, _form, _seen, into, job = result
        self.handed_over += 1
        self.unknown += job.state() == core.DESCRIBE
        while (state := job.wait(-1)) != core.COMPLETE:
            assert state in (core.DESCRIBE, core.KNOCK)
            if state == core.DESCRIBE:
                into = np.empty_like(like) if out is None else out
                job.describe(plan, (), (into,))
        return into if into is None or isinstance(into, list) or into.ndim else into[()]

    def add(
        self,
        value: Any,
        plan: core.Plan | None,
        result: tuple[Any, tuple[int, ...]] | None,
        *,
        kind: int = core.COLLECTIVE,
        peer: int = 0,
        is_open: bool = False,
        form_plan: core.Plan | None = None,
        blob: bytes | None = None,
        see: Callable[[Any, Any], Any] | None = None,
        restore: Callable[[Any], Any] | None = None,
        frame: FrameType | None = None,
        own: tuple[CodeType, ...] = (),
        parts: tuple[tuple[core.Part, ...], ...] | None = None,
    ) -> None:
        terms = "a call", see, restore, self.engine, 7, kind, peer, 5, plan, is_open, None, 0
        dtype, shape = result or (None, ())
        bytes_ = int(np.prod(shape)) * np.dtype(dtype).itemsize if result else 0
        form = (
            ("a form", shape, blob),
            form_plan or plan,
            blob,
            None if dtype is None else np.dtype(dtype),
            shape,
            bytes_,
        )
        self.repeats.add(OPERATION, value, frame or LINE, own, terms, form, parts)  # type: ignore[arg-type]


def _line() -> FrameType:
    return sys._getframe()


LINE = _line()


def sum_plan(engine: core.Engine, elements: int = 4) -> core.Plan:
    return make_plan(engine, core.ALL_REDUCE, ((F32, (elements,), (elements,), (elements,)),), reduce_op=1)


def as_one(body: Callable[[Ours], None]) -> None:
    """Runs it as the only rank, with a sum of four numbers that is remembered."""

    def run(engine: core.Engine, rank: int) -> None:
        ours = Ours(engine)
        ours.add(np.zeros(4, np.float32), sum_plan(engine), (np.float32, (4,)))
        body(ours)

    as_threads(1, run)


def test_arrays_are_taken_as_they_are_or_nothing_is_done() -> None:
    def body(engine: core.Engine, rank: int) -> bool:
        ours = Ours(engine)
        base, fixed = np.ones(6, np.float32), np.zeros(4, np.float32)
        ours.add(base[:4], sum_plan(engine), (np.float32, (4,)))
        fixed.flags.writeable = False
        refused = [
            (base[:4], fixed),
            (base[:4], base[1:5]),
            (base[:4], base[2:6]),
            (np.ones(8, np.float32)[::2], np.zeros(4, np.float32)),
            (np.broadcast_to(base[:1], (4,)), np.zeros(4, np.float32)),
            (base[:4], np.zeros(8, np.float32)[::2]),
            (base[:4], np.zeros(4, np.int32)),
            (base[:4], np.zeros((2, 2), np.float32)),
            (base[:4], [0.0] * 4),
            (base[:3], np.zeros(4, np.float32)),
            ([1.0] * 4, np.zeros(4, np.float32)),
            (None, None),
            (ANY, None),
        ]
        for value, out in refused:
            assert ours.run(value, out) is ABSENT
        assert engine.next_instance() == 0
        for out in (base[:4], np.zeros(4, np.float32), None):
            base[:4] = rank + 1
            result = ours.take(base[:4], out)
            assert out is None or result is out
            assert result.tolist() == [3.0] * 4
        return ours.made == [(4,)] and ours.standing.waiting == (-1 if ours.handed_over == 3 else 0)

    assert as_threads(2, body) == [True, True]


def test_large_results_are_made_apart() -> None:
    def body(engine: core.Engine, rank: int) -> Any:
        ours, elements = Ours(engine), LARGE_BYTES // 4
        value = np.ones(elements, np.float32)
        ours.add(value, sum_plan(engine, elements), (np.float32, (elements,)))
        ours.add(value[1:], sum_plan(engine, elements - 1), (np.float32, (elements - 1,)))
        for one in (value, value[1:]):
            assert ours.take(one).tolist() == [2.0] * len(one)
        return ours.made, ours.made_large

    assert as_threads(2, body) == [([(LARGE_BYTES // 4 - 1,)], [(LARGE_BYTES // 4,)])] * 2


def test_arrays_of_this_numpy_are_read_without_the_buffer_protocol() -> None:
    assert core.knows_layout(np.ndarray)
    assert not any(core.knows_layout(other) for other in (list, bytearray, memoryview, np.float32, Strange))


def test_arrays_whose_items_have_no_format_are_taken_too() -> None:
    halves = np.dtype(ml_dtypes.bfloat16)

    def body(engine: core.Engine, rank: int) -> Any:
        ours, value, out = Ours(engine), np.full(4, rank + 1, halves), np.zeros(4, halves)
        phase = int(DType.BFLOAT16), (4,), (4,), (4,)
        ours.add(value, make_plan(engine, core.ALL_REDUCE, (phase,), reduce_op=1), (halves, (4,)))
        assert ours.take(value, out) is out
        return out.astype(np.float32).tolist()

    assert as_threads(2, body) == [[3.0] * 4] * 2


def test_a_call_is_found_by_operation_type_shape_and_line() -> None:
    def body(ours: Ours) -> None:
        value = np.ones(4, np.float32)
        assert ours.run(value).tolist() == [1.0] * 4
        assert ours.run(value, operation=OTHER_OPERATION) is ABSENT
        assert ours.run(value, frame=_line()) is not ABSENT  # the same code, at the same instruction
        assert ours.run(value, frame=sys._getframe()) is ABSENT
        assert ours.repeats.run(OPERATION, value, None, None) is ABSENT
        for other in (np.ones(4, np.int32), np.ones(4, ">f4"), np.ones((2, 2), np.float32), np.ones((), np.float32)):
            assert ours.run(other) is ABSENT
        ours.repeats.clear()
        assert ours.run(value) is ABSENT

    as_one(body)


def test_nothing_is_run_in_another_generation_or_after_a_verdict_or_once_the_segment_is_left() -> None:
    def body(ours: Ours) -> None:
        value, standing = np.ones(4, np.float32), ours.standing
        standing.verdict = "it is over"
        assert ours.run(value) is ABSENT
        standing.verdict, standing.generation = None, 8
        assert ours.run(value) is ABSENT
        standing.generation = 7
        assert ours.run(value) is not ABSENT
        plan = sum_plan(ours.engine)
        ours.engine.detach()
        assert ours.run(value) is ABSENT
        ours.add(value, plan, (np.float32, (4,)))  # by a thread that has had its result just before
        assert ours.run(value) is ABSENT

    as_one(body)


def test_a_call_with_out_allocates_nothing_and_enters_no_function_of_python() -> None:
    def body(ours: Ours) -> None:
        value, out = np.ones(4, np.float32), np.zeros(4, np.float32)
        run, standing, entered = ours.repeats.run, ours.standing, []
        gc.collect()
        held = sys.getrefcount(value), sys.getrefcount(out), sys.getrefcount(standing), sys.getrefcount(LINE.f_code)
        for _ in range(3):  # what is made once is there
            run(OPERATION, value, out, LINE)
        blocks = sys.getallocatedblocks()
        for _ in range(2000):
            run(OPERATION, value, out, LINE)
        assert sys.getallocatedblocks() - blocks < 100
        sys.setprofile(lambda frame, event, argument: entered.append(frame.f_code) if event == "call" else None)
        try:
            run(OPERATION, value, out, LINE)
        finally:
            sys.setprofile(None)
        assert not entered
        assert held == (
            *(sys.getrefcount(value), sys.getrefcount(out), sys.getrefcount(standing)),
            sys.getrefcount(LINE.f_code),
        )

    as_one(body)


def test_the_callers_line_is_found_through_functions_of_ours() -> None:
    def run(ours: Ours, value: Array) -> Any:
        return ours.run(value, frame=sys._getframe())

    def add(ours: Ours, value: Array) -> Any:
        own = run.__code__, add.__code__
        ours.add(value, sum_plan(ours.engine), (np.float32, (4,)), frame=sys._getframe(), own=own)

    def body(ours: Ours) -> None:
        value = np.ones(4, np.float32)
        calls = [call(ours, value) for call in (run, add, run)]  # all from one instruction
        assert calls[0] is ABSENT
        assert calls[2].tolist() == [1.0] * 4
        assert run(ours, value) is ABSENT

    as_one(body)


def test_as_many_calls_as_there_may_be_and_more() -> None:
    def body(ours: Ours) -> None:
        for rows in range(1, 2100):
            ours.add(np.zeros((rows, 0, 4), np.float32), sum_plan(ours.engine, 0), (np.float32, (rows, 0, 4)))
        assert ours.run(np.zeros((2099, 0, 4), np.float32)).shape == (2099, 0, 4)
        assert ours.run(np.zeros((1, 0, 4), np.float32)) is ABSENT  # forgotten

    as_one(body)


def test_what_is_forgotten_while_it_runs_ends_well() -> None:
    late = threading.Event()

    def body(engine: core.Engine, rank: int) -> list[float]:
        ours, value, found = Ours(engine), np.full(4, rank + 1.0, np.float32), []
        ours.add(value, sum_plan(engine), (np.float32, (4,)))
        if rank:
            assert late.wait(10)
            return list(ours.run(value).tolist())
        waiter = threading.Thread(target=lambda: found.append(ours.run(value)))
        waiter.start()
        while not engine.next_instance():
            pass
        ours.repeats.clear()
        late.set()
        waiter.join()
        (result,) = found
        if isinstance(result, tuple):  # it has waited for long
            call, form, seen, into, job = result
            assert (call, form, seen) == ("a call", ("a form", (4,), None), value)
            finish(engine, job)
            result = into
        return list(result.tolist())

    assert as_threads(2, body) == [[3.0] * 4] * 2


def test_what_does_not_complete_is_handed_over_with_its_job() -> None:
    def body(engine: core.Engine, rank: int) -> Any:
        ours, value = Ours(engine), np.ones(4, np.float32)
        ours.add(value, sum_plan(engine), (np.float32, (4,)))
        engine.abort(core.ABORTED, 0)
        call, _form, seen, into, job = ours.run(value)
        return call, seen is value, into.shape, job.wait(-1)

    assert as_threads(2, body) == [("a call", True, (4,), core.ABORTED)] * 2


class Strange:
    """An array of another library."""

    def __init__(self, array: Array) -> None:
        self.array, self.dtype, self.shape = array, array.dtype, array.shape


def test_arrays_of_other_libraries_are_seen_as_numpys() -> None:
    def see(value: Strange, out: Strange | None) -> tuple[Array, Array | None] | None:
        return None if value.array[0] < 0 else (value.array, None if out is None else out.array)

    def body(ours: Ours) -> None:
        value, out = Strange(np.ones(4, np.float32)), Strange(np.zeros(4, np.float32))
        assert ours.run(value) is ABSENT
        ours.add(value, sum_plan(ours.engine), (np.float32, (4,)), see=see, restore=Strange)
        found = ours.run(value)
        assert type(found) is Strange and found.array.tolist() == [1.0] * 4
        assert ours.run(value, out) is out
        assert out.array.tolist() == [1.0] * 4
        value.array[0] = -1
        assert ours.run(value) is ABSENT

    as_one(body)


def test_an_error_in_seeing_an_array_is_raised_and_nothing_is_begun() -> None:
    def see(value: Strange, out: Strange | None) -> Any:
        raise ZeroDivisionError

    def body(ours: Ours) -> None:
        value = Strange(np.ones(4, np.float32))
        ours.add(value, sum_plan(ours.engine), (np.float32, (4,)), see=see, restore=Strange)
        before = ours.engine.next_instance()
        with pytest.raises(ZeroDivisionError):
            ours.run(value)
        assert ours.engine.next_instance() == before

    as_one(body)


def test_what_a_root_sends_is_known_by_what_it_tells() -> None:
    values: list[Array] = [np.arange(3, dtype=np.int64), np.arange(5, dtype=np.float32), np.array(7, np.int64)]
    dtypes = {np.dtype(np.int64): I64, np.dtype(np.float32): F32}

    def plan_of(engine: core.Engine, value: Array, *, out: bool) -> core.Plan:
        leaves = (value.size,)
        phase = dtypes[value.dtype], leaves, () if out else leaves, leaves
        return make_plan(
            engine, core.BROADCAST, (phase,), meets=core.MEETS_KNOWN if not out else core.MEETS_ANY, is_open=out
        )

    def body(engine: core.Engine, rank: int) -> Any:
        ours, found = Ours(engine), []
        if rank == 0:
            for value in (*values, *values, values[0]):
                blob = f"{value.dtype} {value.shape}".encode()
                finish(
                    engine, engine.run(plan_of(engine, value, out=False), (value,), (np.empty_like(value),), 0, blob)
                )
            return None
        first = make_plan(engine, core.BROADCAST, is_open=True, meets=core.MEETS_ANY)

        def add(value: Array) -> None:
            blob = f"{value.dtype} {value.shape}".encode()
            terms: Any = {"is_open": True, "form_plan": plan_of(engine, value, out=True), "blob": blob}
            ours.add(ANY, first, (value.dtype, value.shape), **terms)

        add(values[0])
        for value in (*values, *values):
            before = ours.unknown
            result = ours.take(ANY, None, value, plan_of(engine, value, out=True))
            if ours.unknown > before:
                add(value)
            assert np.array_equal(result, value) and result.dtype == value.dtype
            found.append(type(result).__name__)
        assert ours.unknown <= 2  # of three kinds one was known before
        out = np.zeros(3, np.int64)
        assert ours.run(ANY, np.zeros(6, np.int64)[::2]) is ABSENT
        assert ours.run(ANY, [1]) is ABSENT
        assert ours.take(ANY, out, None, plan_of(engine, values[0], out=True)) is out
        assert out.tolist() == [0, 1, 2]
        return found

    assert as_threads(2, body) == [None, ["ndarray", "ndarray", "int64"] * 2]


def test_letters_are_sent_and_received_again_and_each_is_known_by_its_description() -> None:
    values: list[Array] = [np.arange(3, dtype=np.int64), np.arange(5, dtype=np.float32), np.array(7, np.int64)]

    def body(engine: core.Engine, rank: int) -> Any:
        ours, found = Ours(engine), []
        for value in values:
            blob = f"{value.dtype} {value.shape}".encode()
            if rank == 0:
                ours.add(value, None, None, kind=core.SEND, peer=1, blob=blob)
            else:
                ours.add(ANY, None, (value.dtype, value.shape), kind=core.RECEIVE, blob=blob)
        for value in (*values, *values):
            if rank == 0:
                assert ours.take(value) is None
            else:
                found.append(ours.take(ANY, like=value))
                assert np.array_equal(found[-1], value) and found[-1].dtype == value.dtype
        assert next(ours.numbers) == 6 - ours.handed_over
        assert ours.unknown == 0
        return [type(one).__name__ for one in found]

    assert as_threads(2, body) == [[], ["ndarray", "ndarray", "int64"] * 2]


def test_what_does_not_fit_together_is_refused() -> None:
    def body(engine: core.Engine, rank: int) -> None:
        ours, value = Ours(engine), np.ones(4, np.float32)
        with pytest.raises(ValueError, match="does not fit its plan"):
            ours.add(value, sum_plan(engine), (np.float64, (4,)))
        with pytest.raises(ValueError, match="does not fit its plan"):
            ours.add(value, sum_plan(engine), None)
        with pytest.raises(ValueError, match="no such kind, seat or tag"):
            ours.add(value, None, None, kind=core.SEND, peer=1)
        with pytest.raises(ValueError, match="no such kind, seat or tag"):
            ours.add(value, None, None, kind=9)
        with pytest.raises(TypeError, match="plan of this engine's"):
            ours.add(value, None, None)
        two = make_plan(engine, core.ALL_REDUCE, ((F32, (8,), (4, 4), (4, 4)),), reduce_op=1)
        with pytest.raises(ValueError, match="more than one leaf"):
            ours.add(value, two, None)
        assert ours.run(value) is ABSENT

    as_threads(1, body)
