"""DLPack's capsules as other libraries make and take them: NumPy and JAX, on the host."""

from __future__ import annotations

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.fakes.client_cuda import FakeClientCuda

from collectived.gpu import dlpack
from collectived.gpu.array import DeviceArray

TYPES = ("bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "complex128")
HOST = (1, 0)


def export(array: np.ndarray[Any, Any]) -> Any:
    seen = DeviceArray(FakeClientCuda(), 0, array.ctypes.data, array.shape, array.dtype, array)
    return dlpack.Export(seen, HOST)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_numpy_hands_out_is_read(dtype: str) -> None:
    array = np.zeros((3, 4, 5), dtype)
    capsule = array.__dlpack__()
    assert dlpack.read(capsule) == (array.ctypes.data, HOST, array.shape, array.dtype, True)
    assert not dlpack.read(array[:, ::2].__dlpack__()).contiguous
    assert not dlpack.read(array.T.__dlpack__()).contiguous
    assert dlpack.read(array[:1].T[..., :1].__dlpack__()).shape == (5, 4, 1)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 1, 2)], ids=str)
def test_arrays_of_every_shape_are_contiguous(shape: tuple[int, ...]) -> None:
    assert dlpack.read(np.zeros(shape).__dlpack__())[2:] == (shape, np.dtype(float), True)


@pytest.mark.parametrize("dtype", TYPES)
def test_numpy_takes_what_is_handed_out_and_lets_go_of_it(dtype: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    gc.collect()
    before = len(dlpack._exported)
    handed = export(array)
    taken = np.from_dlpack(handed)
    handed.close()
    assert taken.ctypes.data == array.ctypes.data and taken.dtype == array.dtype and (taken == array).all()
    assert len(dlpack._exported) == before + 1, "somebody looks into it"
    del taken
    gc.collect()
    assert len(dlpack._exported) == before


def test_jax_takes_bfloat16_and_hands_it_out() -> None:
    jax = pytest.importorskip("jax")
    array = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    handed = export(array)
    taken = jax.numpy.from_dlpack(handed)
    handed.close()
    assert taken.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert dlpack.read(taken.__dlpack__())[2:] == ((2, 3), array.dtype, True)


def test_what_nobody_takes_is_let_go() -> None:
    gc.collect()
    before = len(dlpack._exported)
    handed = export(np.zeros(3))
    capsule = handed.__dlpack__()
    assert len(dlpack._exported) == before + 1
    handed.close()
    assert len(dlpack._exported) == before
    del capsule


def test_what_is_no_capsule_is_refused() -> None:
    array = np.zeros(3)
    capsule = array.__dlpack__()
    with pytest.raises(TypeError, match="no capsule of DLPack, or has been taken over"):
        dlpack.read(object())
    with pytest.raises(TypeError, match="has been taken over"):
        dlpack.read(np.ones(1).__dlpack__(max_version=(1, 0)))
    assert dlpack.read(capsule).shape == (3,)
