"""Which binding of NCCL is used, and what is said where there is none; what an answer of NCCL is to a caller."""

from __future__ import annotations

import subprocess
import sys
from typing import cast

import pytest

from collectived_proto.errors import FailedPreconditionError
from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.arithmetic import Arithmetic
from collectived_runtime.device.nccl.binding import LOADERS, load_binding
from collectived_runtime.device.nccl.interface import Nccl, NcclDataType, element_layout, split_count


class Loaded:
    def __init__(self, name: str) -> None:
        self.name = name


def there(name: str) -> Nccl:
    return cast(Nccl, Loaded(name))


def absent() -> Nccl:
    raise ImportError("No module named 'it'")


def test_the_order_of_preference_is_nccl4py_cupy_pynccl() -> None:
    assert list(LOADERS) == ["nccl4py", "cupy", "pynccl"]


def test_the_first_that_is_there_is_used() -> None:
    loaders = {"nccl4py": absent, "cupy": lambda: there("cupy"), "pynccl": lambda: there("pynccl")}
    assert load_binding("", loaders).name == "cupy"
    assert load_binding("pynccl", loaders).name == "pynccl"


def test_where_the_wanted_one_is_missing_no_other_is_used_and_the_error_says_what_to_install() -> None:
    loaders = {"nccl4py": lambda: there("nccl4py"), "pynccl": absent}
    with pytest.raises(FailedPreconditionError, match=r"pynccl: No module.*collectived\[pynccl\]") as caught:
        load_binding("pynccl", loaders)
    assert "nccl4py" not in str(caught.value)


def test_where_none_is_there_the_error_names_all() -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        load_binding("", dict.fromkeys(LOADERS, absent))
    assert all(name in str(caught.value) for name in LOADERS)


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="'rccl': expected one of nccl4py, cupy, pynccl"):
        load_binding("rccl")


def test_importing_what_users_and_daemons_import_imports_neither_cupy_nor_nccl() -> None:
    program = (
        "import sys, collectived, collectived_runtime.worker.server, collectived_runtime.device.nccl.binding\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('cupy', 'cupy_backends', 'nccl', 'pynccl')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("operation", "dtype", "result", "found"),
    [
        (ReduceOp.SUM, DType.INT32, DType.INT32, (NcclDataType.INT32, 1)),
        (ReduceOp.SUM, DType.BFLOAT16, DType.BFLOAT16, (NcclDataType.FLOAT32, 1)),
        (ReduceOp.MEAN, DType.FLOAT16, DType.FLOAT16, (NcclDataType.FLOAT32, 1)),
        (ReduceOp.MAX, DType.FLOAT64, DType.FLOAT64, (NcclDataType.FLOAT64, 1)),
        (ReduceOp.PRODUCT, DType.UINT8, DType.UINT8, (NcclDataType.UINT8, 1)),
        (ReduceOp.MEAN, DType.INT16, DType.FLOAT32, (NcclDataType.INT64, 1)),
        (ReduceOp.MEAN, DType.INT64, DType.FLOAT64, (NcclDataType.INT64, 2)),
        (ReduceOp.SUM, DType.COMPLEX64, DType.COMPLEX64, (NcclDataType.FLOAT32, 2)),
        (ReduceOp.PRODUCT, DType.COMPLEX64, DType.COMPLEX64, None),
        (ReduceOp.SUM, DType.INT16, DType.INT16, None),
        (ReduceOp.BXOR, DType.INT32, DType.INT32, None),
    ],
)
def test_nccl_folds_partial_sums_of_these_types(
    operation: ReduceOp, dtype: DType, result: DType, found: tuple[NcclDataType, int] | None
) -> None:
    assert element_layout(Arithmetic(operation, dtype, result, 4)) == found


@pytest.mark.parametrize(
    ("count", "most", "parts"), [(0, 5, [(0, 0)]), (5, 5, [(0, 5)]), (11, 5, [(0, 5), (5, 5), (10, 1)])]
)
def test_a_long_vector_is_called_for_in_parts(count: int, most: int, parts: list[tuple[int, int]]) -> None:
    assert list(split_count(count, most)) == parts
