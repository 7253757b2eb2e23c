"""The kernels that fold on GPUs, compiled here for the host: they give what the worker's own arithmetic gives."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectived_proto.numpy_types import to_numpy
from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.arithmetic import Arithmetic, unsupported_reason
from collectived_runtime.device.cuda.driver import FoldSpec
from collectived_runtime.device.cuda.kernels import PACK_BYTES, generate_source, pack_width
from collectived_runtime.engine.gpu.spreading import WORDS, make_move_spec
from collectived_runtime.plan.packing import result_dtype

COMPILER = shutil.which("g++")
COUNT = 1003  # elements: no whole number of packs
PAIRS = [(op, dtype) for op, dtype in itertools.product(ReduceOp, DType) if not unsupported_reason(op, dtype)]
FORMS = ((3, 2), (3, 1), (1, 2))  # sources and outputs of the three folds
_ON_THE_HOST = """
#include <cstring>
#define __device__ static inline
#define __global__
struct { unsigned x; } static gridDim = {1}, blockDim = {1}, blockIdx = {0}, threadIdx = {0};
"""
_ENTRY = """
extern "C" void %s(const void **at, void **outs, Count length, Count packs, double contributions) {
    Rows rows;
    for (int i = 0; i < %d; i++) rows.sources[i] = (const Source *)at[i];
    for (int i = 0; i < %d; i++) rows.outs[i] = (Out *)outs[i];
    fold(rows, length, packs, contributions);
}
"""

# Sources, outputs, and whether they are taken as packs.
Folder = Callable[[FoldSpec, Sequence[NDArray[Any]], Sequence[NDArray[Any]], bool], None]


def folds(op: ReduceOp, dtype: DType, ranks: int) -> tuple[FoldSpec, FoldSpec, FoldSpec]:
    """All in one; to partial sums; from partial sums to the result."""
    result = result_dtype(dtype, op)
    return (
        FoldSpec(op, dtype, result, ranks, widen=True, finish=True),
        FoldSpec(op, dtype, result, ranks, widen=True, finish=False),
        FoldSpec(op, dtype, result, ranks, widen=False, finish=True),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Folds by the kernels of all that is defined, compiled at once."""
    if COMPILER is None:
        pytest.skip("g++ is not installed, which compiles the kernels for the host")
    place: Path = tmp_path_factory.mktemp("kernels")
    names: dict[FoldSpec, str] = {}
    parts = [_ON_THE_HOST]
    for op, dtype in PAIRS:
        for number, (fold, (count, outs)) in enumerate(zip(folds(op, dtype, 3), FORMS, strict=True)):
            name = f"{op.value}_{dtype.label}_{number}"
            names[fold] = name
            text = generate_source(fold, count, outs).replace('extern "C" __global__', "static")
            parts.append(f"namespace of_{name} {{\n{text}\n{_ENTRY % (name, count, outs)}\n}}\n")
    for word in WORDS:
        name = names[make_move_spec(word)] = f"move_{word.label}"
        text = generate_source(make_move_spec(word), 1, 3).replace('extern "C" __global__', "static")
        parts.append(f"namespace of_{name} {{\n{text}\n{_ENTRY % (name, 1, 3)}\n}}\n")
    (place / "kernels.cpp").write_text("".join(parts))
    library = place / "kernels.so"
    line = [COMPILER, "-O1", "-fwrapv", "-ffp-contract=off", "-w", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*line, str(place / "kernels.cpp")], check=True, timeout=50)
    loaded = ctypes.CDLL(str(library))

    def fold_on_host(
        fold: FoldSpec, sources: Sequence[NDArray[Any]], outs: Sequence[NDArray[Any]], packed: bool
    ) -> None:
        assert not packed or all(one.ctypes.data % PACK_BYTES == 0 for one in (*sources, *outs))
        loaded[names[fold]](
            (ctypes.c_void_p * len(sources))(*(one.ctypes.data for one in sources)),
            (ctypes.c_void_p * len(outs))(*(one.ctypes.data for one in outs)),
            ctypes.c_ulonglong(COUNT),
            ctypes.c_ulonglong(COUNT // pack_width(fold) if packed else 0),
            ctypes.c_double(fold.contributions),
        )

    return fold_on_host


def values(dtype: DType, seed: int) -> NDArray[Any]:
    """Elements of all magnitudes, with those that are no numbers where the type has them."""
    random = np.random.default_rng(seed)
    kind = to_numpy(dtype)
    if dtype.is_integer:
        info = np.iinfo(kind)
        return random.integers(info.min, info.max, COUNT, kind, endpoint=True)
    made = random.standard_normal(COUNT) * 10.0 ** random.integers(-9, 5, COUNT)
    if dtype.is_complex:
        made = made + 1j * random.standard_normal(COUNT)
    else:
        made[:4] = np.inf, -np.inf, np.nan, 0.0
    with np.errstate(over="ignore"):
        found: NDArray[Any] = made.astype(kind)
    return found


def same(got: NDArray[Any], expected: NDArray[Any]) -> bool:
    if got.dtype.kind in "iu":
        return bool((got == expected).all())
    if got.dtype.kind == "c":  # NumPy multiplies and divides them with roundings of its own
        return np.allclose(got, expected, rtol=1e-5 if got.dtype == np.complex64 else 1e-13)
    return np.array_equal(got.astype(np.float64), expected.astype(np.float64), equal_nan=True)


@pytest.mark.parametrize("packed", [False, True], ids=["elements", "packs"])
@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.label)
def test_a_kernel_of_one_source_writes_it_as_it_is_to_every_place(word: DType, packed: bool, folder: Folder) -> None:
    value = values(word, 5)
    outs = [np.zeros_like(value) for _ in range(3)]
    folder(make_move_spec(word), [value], outs, packed)
    assert all((out == value).all() for out in outs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("packed", [False, True], ids=["elements", "packs"])
@pytest.mark.parametrize(("op", "dtype"), PAIRS, ids=lambda one: one.value if isinstance(one, ReduceOp) else one.label)
def test_a_kernel_gives_the_bits_that_the_host_gives(op: ReduceOp, dtype: DType, packed: bool, folder: Folder) -> None:
    arithmetic = Arithmetic(op, dtype, result_dtype(dtype, op), 3)
    sources = [values(dtype, seed) for seed in range(3)]
    expected = np.empty(COUNT, to_numpy(arithmetic.result_dtype))
    arithmetic.combine(sources, expected)
    at_once, gather, finish = folds(op, dtype, 3)

    outs = [np.empty_like(expected) for _ in range(2)]
    folder(at_once, sources, outs, packed)
    assert all(same(out, expected) for out in outs)

    partials = arithmetic.view_partials(np.empty(COUNT * arithmetic.partial_bytes, np.uint8), COUNT)
    folder(gather, sources, [partials], packed)
    known = np.empty_like(partials)
    arithmetic.fold_all(sources, known)
    assert same(partials, known)
    outs = [np.empty_like(expected) for _ in range(2)]
    folder(finish, [partials], outs, packed)
    assert all(same(out, expected) for out in outs)


@pytest.mark.parametrize("packed", [False, True], ids=["elements", "packs"])
def test_a_result_may_replace_a_source(packed: bool, folder: Folder) -> None:
    sources = [values(DType.INT32, seed) for seed in range(3)]
    expected = sources[0] + sources[1] + sources[2]
    folder(folds(ReduceOp.SUM, DType.INT32, 3)[0], sources, [sources[1], sources[2]], packed)
    assert (sources[1] == expected).all() and (sources[2] == expected).all()


def test_the_kernels_compile_for_a_gpu() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings are not installed, by which NVRTC is asked")
    from collectived_runtime.device.cuda import compiler

    try:
        compiler.version()
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not installed, which compiles for GPUs: {error}")
    for op, dtype in PAIRS:
        for fold, (count, outs) in zip(folds(op, dtype, 3), FORMS, strict=True):
            assert b".entry fold" in compiler.compile_ptx(generate_source(fold, count, outs), (9, 0))
