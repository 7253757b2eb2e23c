"""Copies of arrays: the same bytes, whatever the size, the layout and the type."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectived.values.copying import STREAMED_BYTES, copy_into, copy_of

BEYOND = STREAMED_BYTES + 24
NATIVE = 32 << 10


def numbers(dtype: Any, nbytes: int) -> Any:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.complex128, ml_dtypes.bfloat16, np.bool_], ids=str)
@pytest.mark.parametrize("nbytes", [0, 48, NATIVE - 16, NATIVE, STREAMED_BYTES - 16, STREAMED_BYTES, BEYOND // 16 * 16])
def test_a_copy_has_the_same_bytes_also_of_what_cannot_be_written(dtype: Any, nbytes: int) -> None:
    source = numbers(dtype, nbytes)
    source.flags.writeable = False
    target = np.zeros_like(source)
    copy_into(target, source)
    assert target.tobytes() == source.tobytes()
    made = copy_of(source)
    assert made.tobytes() == source.tobytes()
    assert (made.dtype, made.flags.writeable) == (source.dtype, True)


def test_a_copy_of_an_array_of_another_layout_has_its_values() -> None:
    square = np.arange(1 << 16, dtype=np.float32).reshape(256, -1)
    assert np.array_equal(copy_of(square.T), square.T)
    assert np.array_equal(copy_of(square[::2]), square[::2])


def test_arrays_are_copied_without_a_core_too() -> None:
    environment = os.environ | {"COLLECTIVED_NATIVE": "/nowhere/core.so"}
    program = (
        "import numpy as np; from collectived.values.copying import copy_into, copy_of, find_copy\n"
        "source = np.arange(1 << 16); target = np.zeros_like(source); copy_into(target, source)\n"
        "print(find_copy(streamed=False), np.array_equal(target, source) and np.array_equal(copy_of(source), source))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert found.stdout == "None True\n", found.stderr


@pytest.mark.parametrize("start", [0, 1, 15, 63])
def test_a_large_copy_may_begin_at_any_address_and_writes_nothing_else(start: int) -> None:
    source = numbers(np.uint8, BEYOND)
    memory = np.full(BEYOND + 128, 7, np.uint8)
    copy_into(memory[start : start + BEYOND], source)
    assert np.array_equal(memory[start : start + BEYOND], source)
    assert np.all(memory[:start] == 7) and np.all(memory[start + BEYOND :] == 7)


def test_large_arrays_of_other_layouts_or_byte_order_are_copied_by_element() -> None:
    source = numbers(np.uint32, BEYOND)
    swapped = np.empty(source.shape, source.dtype.newbyteorder())
    copy_into(swapped, source)
    assert np.array_equal(swapped, source)
    assert swapped.tobytes() != source.tobytes()
    square = np.arange(3 << 20, dtype=np.float32).reshape(1024, -1)
    for target, given in [(np.zeros_like(square), square.copy("F")), (np.zeros(square.shape[::-1], "f4").T, square)]:
        copy_into(target, given)
        assert np.array_equal(target, square)
