"""What each reduce operation promises of its numbers."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.arithmetic import Arithmetic, unsupported_reason
from collectived_runtime.plan.packing import result_dtype

Array = NDArray[Any]


def reduce(op: ReduceOp, dtype: DType, sources: list[Array]) -> Array:
    """All sources through widen, fold and finish, as a worker with that many local ranks does it."""
    result = result_dtype(dtype, op)
    arithmetic = Arithmetic(op, dtype, result, len(sources))
    count = len(sources[0])
    partials = arithmetic.view_partials(np.empty(count * arithmetic.partial_bytes, np.uint8), count)
    arithmetic.fold_all(sources, partials)
    out = np.empty(count, to_numpy(result))
    arithmetic.finish(partials, out)
    if arithmetic.can_finish_in_place:
        arithmetic.finish_in_place(partials)
        assert partials.tobytes() == out.tobytes()
    combined = np.empty_like(out)
    arithmetic.combine(sources, combined)
    assert combined.tobytes() == out.tobytes()  # the same bits as step by step
    return out


DEFINED = [(op, dtype) for op in ReduceOp for dtype in DType if not unsupported_reason(op, dtype)]


@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=lambda value: value.name.lower())
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_results_agree_with_a_wide_reference(op: ReduceOp, dtype: DType, ranks: int) -> None:
    random = np.random.default_rng(ranks)
    sources = [random.integers(1, 6, 1000).astype(to_numpy(dtype)) for _ in range(ranks)]
    wide = [np.asarray(one, np.complex128 if dtype.is_complex else np.float64) for one in sources]
    match op:
        case ReduceOp.SUM | ReduceOp.MEAN:
            expected = np.sum(wide, axis=0) / (ranks if op is ReduceOp.MEAN else 1)
        case ReduceOp.PRODUCT:
            expected = np.prod(wide, axis=0)
        case ReduceOp.MIN:
            expected = np.min(wide, axis=0)
        case ReduceOp.MAX:
            expected = np.max(wide, axis=0)
        case _:
            bits = {ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or, ReduceOp.BXOR: np.bitwise_xor}
            expected = bits[op].reduce(sources)
    found = reduce(op, dtype, sources)
    assert found.dtype == to_numpy(result_dtype(dtype, op))
    assert np.allclose(found, expected.astype(found.dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_sums_round_once(dtype: Any) -> None:
    kind = DType.FLOAT16 if dtype is np.float16 else DType.BFLOAT16
    sources = [np.full(8, value, dtype) for value in (1.0, 2.0**-9, 2.0**-9, 2.0**-9)]
    exact = np.sum([one.astype(np.float32) for one in sources], axis=0)
    assert np.array_equal(reduce(ReduceOp.SUM, kind, sources), exact.astype(dtype))


def test_a_mean_of_float16_does_not_overflow_when_the_mean_is_representable() -> None:
    sources = [np.full(4, 60000, np.float16) for _ in range(4)]
    assert np.array_equal(reduce(ReduceOp.MEAN, DType.FLOAT16, sources), sources[0])


@pytest.mark.parametrize("dtype", [DType.INT64, DType.UINT64], ids=lambda d: d.label)
def test_a_mean_of_64_bit_integers_is_exact_where_a_sum_would_wrap(dtype: DType) -> None:
    largest = np.iinfo(to_numpy(dtype)).max
    sources = [np.full(3, largest, to_numpy(dtype)) for _ in range(3)]
    assert np.array_equal(reduce(ReduceOp.MEAN, dtype, sources), np.full(3, float(largest)))


def test_a_mean_of_negative_64_bit_integers_is_right() -> None:
    sources = [np.array([-(2**62), -1, 5]), np.array([-(2**62), -2, -6])]
    assert reduce(ReduceOp.MEAN, DType.INT64, sources).tolist() == [-(2.0**62), -1.5, -0.5]


def test_sums_of_integers_wrap_as_in_numpy() -> None:
    sources = [np.array([127], np.int8), np.array([1], np.int8)]
    assert reduce(ReduceOp.SUM, DType.INT8, sources).tolist() == [-128]


def test_the_mean_of_one_rank_has_the_type_of_a_mean() -> None:
    assert reduce(ReduceOp.MEAN, DType.INT32, [np.array([3], np.int32)]).dtype == np.float64


def test_long_vectors_are_folded_in_stretches_with_the_same_bits() -> None:
    random = np.random.default_rng(0)
    sources = [random.standard_normal(3_000_001).astype(np.float32) for _ in range(3)]
    expected = (sources[0] + sources[1]) + sources[2]
    assert reduce(ReduceOp.SUM, DType.FLOAT32, sources).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("op", "dtype", "word"),
    [
        (ReduceOp.SUM, DType.BOOL, "bool"),
        (ReduceOp.BOR, DType.FLOAT32, "integers"),
        (ReduceOp.MAX, DType.COMPLEX64, "order"),
    ],
)
def test_what_is_not_defined_says_why(op: ReduceOp, dtype: DType, word: str) -> None:
    assert word in unsupported_reason(op, dtype)


HALVES = pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.label)


@HALVES
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.value)
def test_every_bit_pattern_of_a_half_folds_as_in_single_precision_and_is_rounded_once(
    op: ReduceOp, dtype: DType, ranks: int
) -> None:
    kind = to_numpy(dtype)
    patterns = np.arange(1 << 16, dtype=np.uint16)
    random = np.random.default_rng(7)
    sources = [patterns.view(kind), *(random.permutation(patterns).view(kind) for _ in range(ranks - 1))]
    with np.errstate(all="ignore"):
        wide = [np.asarray(one, np.float32) for one in sources]
        ufunc = {ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}.get(op, np.add)
        expected = functools.reduce(ufunc, wide)
        expected = (expected / np.float32(ranks) if op is ReduceOp.MEAN else expected).astype(kind)
        found = reduce(op, dtype, sources)
    no_number = np.isnan(np.asarray(expected, np.float32))
    assert (found.view(np.uint16)[~no_number] == expected.view(np.uint16)[~no_number]).all()
    assert np.isnan(np.asarray(found[no_number], np.float32)).all()
