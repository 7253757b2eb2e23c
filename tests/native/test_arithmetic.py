"""Folds of the native core: the same bits as the NumPy path, whatever the processor, the cut or the address."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectived_native import core
from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.arithmetic import Arithmetic, unsupported_reason
from collectived_runtime.plan.packing import result_dtype

Array = NDArray[Any]

NUMBER = {op: number for number, op in enumerate(ReduceOp, 1)}  # as on the wire
DEFINED = [(op, dtype) for op in ReduceOp for dtype in DType if not unsupported_reason(op, dtype)]
VARIANTS = [name for name in ("baseline", "avx2") if core.choose_arithmetic(name)]
EXTREMES = (
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    1e-40,
    -1e-40,
    2.0**-24,
    2.0**-25,
    6e-8,
    65504,
    65519,
    65520,
    3e38,
    -3e38,
)
HALVES = pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.label)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    assert core.choose_arithmetic(request.param)
    yield request.param
    core.choose_arithmetic(VARIANTS[-1])


def fold(
    op: ReduceOp,
    dtype: DType,
    sources: list[Array],
    *,
    final: bool = True,
    divisor: int = 0,
    stream: bool = False,
    out: Array | None = None,
) -> Array:
    """The core's fold of these contributions; partials as bytes."""
    number = NUMBER[op]
    _, partial, _ = core.arithmetic_sizes(dtype, number)
    if out is None:
        result = to_numpy(result_dtype(dtype, op)) if final else np.dtype((np.void, partial))
        out = np.empty(len(sources[0]), result)
    spans = [as_bytes(source) for source in sources]
    core.fold_inputs(dtype, number, as_bytes(out), spans, final, divisor or len(sources), stream)
    return out


def fold_partials(op: ReduceOp, dtype: DType, partials: list[Array], *, final: bool, divisor: int) -> Array:
    result = to_numpy(result_dtype(dtype, op)) if final else partials[0].dtype
    out = np.empty(len(partials[0]), result)
    core.fold_partials(dtype, NUMBER[op], as_bytes(out), [as_bytes(one) for one in partials], final, divisor, False)
    return out


def as_bytes(array: Array) -> Array:
    return array.view(np.uint8) if array.size else np.empty(0, np.uint8)


def multiply_plainly(left: Array, right: Array) -> Array:
    """A product of complex numbers, every operation rounded; NumPy fuses two of them where the processor can."""
    out = np.empty_like(left)
    out.real = left.real * right.real - left.imag * right.imag
    out.imag = left.real * right.imag + left.imag * right.real
    return out


def expected(op: ReduceOp, dtype: DType, sources: list[Array], divisor: int = 0) -> Array:
    """What the NumPy path makes of these contributions."""
    with np.errstate(all="ignore"):
        if op is ReduceOp.PRODUCT and dtype.is_complex:
            return functools.reduce(multiply_plainly, sources).copy()
        result = result_dtype(dtype, op)
        out = np.empty(len(sources[0]), to_numpy(result))
        Arithmetic(op, dtype, result, divisor or len(sources)).combine(sources, out)
        return out


def draw(random: np.random.Generator, dtype: DType, count: int) -> Array:
    """Numbers of all kinds: any bits for integers, and for the others ordinary ones with extremes among them."""
    kind = to_numpy(dtype)
    if dtype.is_integer:
        return random.integers(0, 256, count * kind.itemsize, np.uint8).view(kind)
    parts = count * (2 if dtype.is_complex else 1)
    values = random.standard_normal(parts) * 10.0 ** random.integers(-5, 5, parts)
    is_extreme = random.random(parts) < 0.2
    values[is_extreme] = random.choice(EXTREMES, is_extreme.sum())
    with np.errstate(all="ignore"):
        if dtype.is_complex:
            return values.astype(np.float32 if dtype is DType.COMPLEX64 else np.float64).view(kind)
        return values.astype(kind)


def assert_same_bits(found: Array, wanted: Array) -> None:
    """All bits are equal, and where one is no number the other is none."""
    assert found.dtype == wanted.dtype and len(found) == len(wanted)
    if found.dtype.kind in "iu":
        assert found.tobytes() == wanted.tobytes()
        return
    if found.dtype.kind == "c":
        real = np.dtype(f"f{found.dtype.itemsize // 2}")
        found, wanted = found.view(real), wanted.view(real)
    bits = np.dtype(f"u{found.dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # ml_dtypes says so of NaNs
        is_nan = np.isnan(wanted.astype(np.float64))
        assert (np.isnan(found.astype(np.float64)) == is_nan).all()
    assert (found.view(bits)[~is_nan] == wanted.view(bits)[~is_nan]).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=lambda value: value.name.lower())
def test_results_have_the_bits_of_the_numpy_path(variant: str, op: ReduceOp, dtype: DType, ranks: int) -> None:
    random = np.random.default_rng([ranks, NUMBER[op], dtype])
    for count in (0, 1, 17, 3001):
        sources = [draw(random, dtype, count) for _ in range(ranks)]
        wanted = expected(op, dtype, sources)
        assert_same_bits(fold(op, dtype, sources), wanted)
        assert_same_bits(fold(op, dtype, sources, stream=True), wanted)


@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=lambda value: value.name.lower())
def test_partials_fold_to_the_result_of_all_contributions(variant: str, op: ReduceOp, dtype: DType) -> None:
    """Two hosts of two ranks, the left fold of each: the same bits where the operation is associative on this type."""
    random = np.random.default_rng([NUMBER[op], dtype])
    sources = [draw(random, dtype, 1001) for _ in range(3)]
    left = fold(op, dtype, sources[:2], final=False)
    right = fold(op, dtype, sources[2:], final=False)
    found = fold_partials(op, dtype, [left, right], final=True, divisor=3)
    assert_same_bits(found, expected(op, dtype, sources))  # lower ranks left: ((a, b), c) is the same fold
    unfinished = fold_partials(op, dtype, [left, right], final=False, divisor=3)
    assert_same_bits(fold_partials(op, dtype, [unfinished], final=True, divisor=3), found)


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BOOL], ids=lambda d: d.label)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN], ids=lambda op: op.value)
def test_partials_are_those_of_the_numpy_path(variant: str, op: ReduceOp, dtype: DType) -> None:
    random = np.random.default_rng([NUMBER[op], dtype])
    sources = [draw(random, dtype, 999) for _ in range(4)]
    arithmetic = Arithmetic(op, dtype, result_dtype(dtype, op), 4)
    wanted = arithmetic.view_partials(np.empty(999 * arithmetic.partial_bytes, np.uint8), 999)
    with np.errstate(all="ignore"):
        arithmetic.fold_all(sources, wanted)
    found = fold(op, dtype, sources, final=False)
    assert_same_bits(as_bytes(found).view(wanted.dtype), wanted.reshape(-1))


@pytest.mark.parametrize(("op", "dtype"), [*itertools.product(ReduceOp, DType)], ids=lambda value: value.name.lower())
def test_sizes_are_those_of_the_numpy_path_and_zero_where_an_operation_is_not_defined(
    op: ReduceOp, dtype: DType
) -> None:
    if unsupported_reason(op, dtype):
        assert core.arithmetic_sizes(dtype, NUMBER[op]) == (dtype.itemsize, 0, 0)
        with pytest.raises(ValueError, match="not defined"):
            core.fold_inputs(dtype, NUMBER[op], bytearray(16), [bytes(16)], True, 1, False)
        return
    result = result_dtype(dtype, op)
    partial = Arithmetic(op, dtype, result, 1).partial_bytes
    assert core.arithmetic_sizes(dtype, NUMBER[op]) == (dtype.itemsize, partial, result.itemsize)


@HALVES
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.value)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_bit_pattern_of_a_half_has_the_bits_of_the_numpy_path(
    variant: str, op: ReduceOp, dtype: DType, ranks: int
) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    random = np.random.default_rng(7)
    sources = [patterns, *(random.permutation(patterns) for _ in range(ranks - 1))]
    halves = [one.view(to_numpy(dtype)) for one in sources]
    assert_same_bits(fold(op, dtype, halves), expected(op, dtype, halves))


@HALVES
def test_processors_with_and_without_instructions_for_halves_give_the_same_bits_even_of_what_is_no_number(
    dtype: DType,
) -> None:
    if "avx2" not in VARIANTS:
        pytest.skip("this processor has no AVX2 and F16C: there is one variant only")
    halves = np.arange(1 << 16, dtype=np.uint16).view(to_numpy(dtype))
    random = np.random.default_rng(3)
    singles = random.integers(0, 1 << 32, 1 << 18, np.uint32).view(np.float32)
    edges = np.array([*EXTREMES, *(-value for value in EXTREMES)], np.float32)
    singles = np.concatenate([singles, edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(1))])
    found = []
    for name in VARIANTS:
        assert core.choose_arithmetic(name)
        widened = fold(ReduceOp.SUM, dtype, [halves], final=False)
        rounded = fold_partials(ReduceOp.SUM, dtype, [singles], final=True, divisor=1)
        found.append((widened.tobytes(), rounded.tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.value)
def test_extremes_keep_what_is_no_number_from_either_side(variant: str, op: ReduceOp, dtype: DType) -> None:
    kind = to_numpy(dtype)
    numbers, none = np.arange(40).astype(kind), np.full(40, np.nan).astype(kind)
    for sources in ([numbers, none, numbers], [none, numbers, numbers], [numbers, numbers, none]):
        assert np.isnan(fold(op, dtype, sources).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [DType.INT64, DType.UINT64], ids=lambda dtype: dtype.label)
def test_a_mean_of_the_largest_integers_is_exact(variant: str, dtype: DType) -> None:
    largest = np.iinfo(to_numpy(dtype)).max
    sources = [np.full(9, largest, to_numpy(dtype)) for _ in range(5)]
    assert np.array_equal(fold(ReduceOp.MEAN, dtype, sources), np.full(9, float(largest)))


def test_a_mean_divides_by_what_is_asked_for_and_not_by_the_number_of_spans(variant: str) -> None:
    sources = [np.full(5, 6, np.int16), np.full(5, 8, np.int16)]
    assert fold(ReduceOp.MEAN, DType.INT16, sources, divisor=4).tolist() == [3.5] * 5


def test_integers_wrap(variant: str) -> None:
    sources = [np.full(33, 127, np.int8), np.full(33, 2, np.int8)]
    assert fold(ReduceOp.SUM, DType.INT8, sources).tolist() == [-127] * 33
    assert fold(ReduceOp.PRODUCT, DType.INT8, sources).tolist() == [-2] * 33
    largest = [np.full(9, 65535, np.uint16)] * 2
    assert fold(ReduceOp.PRODUCT, DType.UINT16, largest).tolist() == [1] * 9


@settings(max_examples=150, deadline=None)
@given(
    case=st.sampled_from(DEFINED),
    ranks=st.integers(1, 6),
    count=st.integers(0, 700),
    shifts=st.lists(st.integers(0, 63), min_size=7, max_size=7),
    cut=st.integers(0, 700),
    stream=st.booleans(),
    in_place=st.integers(0, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_neither_addresses_nor_cuts_nor_streaming_nor_a_result_in_place_change_a_bit(
    case: tuple[ReduceOp, DType],
    ranks: int,
    count: int,
    shifts: list[int],
    cut: int,
    stream: bool,
    in_place: int,
    seed: int,
) -> None:
    op, dtype = case
    random = np.random.default_rng(seed)
    sources = [draw(random, dtype, count) for _ in range(ranks)]
    wanted = fold(op, dtype, sources)
    moved = []
    for source, shift in zip(sources, shifts, strict=False):
        memory = np.zeros(source.nbytes + shift, np.uint8)
        memory[shift:] = as_bytes(source)
        moved.append(memory[shift:])
    _, _, size = core.arithmetic_sizes(dtype, NUMBER[op])
    memory = np.full(count * size + shifts[-1] + 64, 0xA5, np.uint8)
    out = memory[shifts[-1] : shifts[-1] + count * size]
    if size == dtype.itemsize and in_place < ranks:
        out = moved[in_place]
    cut = min(cut, count)
    for start, end in ((0, cut), (cut, count)):
        spans = [one[start * dtype.itemsize : end * dtype.itemsize] for one in moved]
        core.fold_inputs(dtype, NUMBER[op], out[start * size : end * size], spans, True, ranks, stream)
    assert_same_bits(out.copy().view(wanted.dtype), wanted)
    if out.base is memory:
        assert (memory[: shifts[-1]] == 0xA5).all() and (memory[shifts[-1] + count * size :] == 0xA5).all()


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ((12, 1, bytearray(8), [bytes(8)], True, 0, False), ValueError, "divisor"),
        ((12, 1, bytearray(7), [bytes(7)], True, 1, False), ValueError, "whole results of 4"),
        ((12, 1, bytearray(8), [bytes(8), bytes(4)], True, 1, False), ValueError, "span 1 has 4 bytes, expected 8"),
        ((12, 1, bytearray(8), [], True, 1, False), ValueError, "1 to 4096 spans"),
        ((12, 1, bytes(8), [bytes(8)], True, 1, False), (BufferError, TypeError), "read-only|writable"),
        ((12, 1, bytearray(8), [bytes(8), 7], True, 1, False), TypeError, "bytes-like"),
        ((16, 1, bytearray(8), [bytes(8)], True, 1, False), ValueError, "operation 1 is not defined on type 16"),
        ((-1, 99, bytearray(8), [bytes(8)], True, 1, False), ValueError, "not defined"),
        ((12, 1, bytearray(8)), TypeError, "expected"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_read(arguments: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        core.fold_inputs(*arguments)
    if len(arguments) > 2 and isinstance(arguments[2], bytearray):
        arguments[2].append(1)  # nothing holds it any more


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 4096, 100_003])
@pytest.mark.parametrize("start", [0, 1, 16, 63])
def test_a_copy_past_the_caches_has_the_same_bytes_and_writes_nothing_else(start: int, length: int) -> None:
    source = bytes(byte % 251 for byte in range(length))
    memory = bytearray(b"\xff") * (length + 128)
    core.copy_streamed(memoryview(memory)[start : start + length], source)
    assert memory == b"\xff" * start + source + b"\xff" * (128 - start)


def test_a_copy_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="the source has 3 bytes, expected 4"):
        core.copy_streamed(bytearray(4), bytes(3))
    with pytest.raises(BufferError):
        core.copy_streamed(bytes(4), bytes(4))
    with pytest.raises(TypeError, match="expected"):
        core.copy_streamed(bytearray(4))  # type: ignore[call-arg]
