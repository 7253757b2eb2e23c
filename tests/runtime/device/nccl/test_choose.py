"""Which binding of NCCL is used, and what is said where there is none; what an answer of NCCL is to a caller."""

from __future__ import annotations

import subprocess
import sys
from typing import cast

import pytest

from collectived_proto.errors import FailedPreconditionError
from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.nccl.choose import LOADERS, choose
from collectived_runtime.device.nccl.interface import DataType, Nccl, Operation, data_type, in_parts, operation


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
    assert choose("", loaders).name == "cupy"
    assert choose("pynccl", loaders).name == "pynccl"


def test_where_the_wanted_one_is_missing_no_other_is_used_and_the_error_says_what_to_install() -> None:
    loaders = {"nccl4py": lambda: there("nccl4py"), "pynccl": absent}
    with pytest.raises(FailedPreconditionError, match=r"pynccl: No module.*collectived\[pynccl\]") as caught:
        choose("pynccl", loaders)
    assert "nccl4py" not in str(caught.value)


def test_where_none_is_there_the_error_names_all() -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        choose("", dict.fromkeys(LOADERS, absent))
    assert all(name in str(caught.value) for name in LOADERS)


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="'rccl': expected one of nccl4py, cupy, pynccl"):
        choose("rccl")


def test_importing_what_users_and_daemons_import_imports_neither_cupy_nor_nccl() -> None:
    program = (
        "import sys, collectived, collectived_runtime.worker.server, collectived_runtime.device.nccl.choose\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('cupy', 'cupy_backends', 'nccl', 'pynccl')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", ["INT32", "BFLOAT16", "FLOAT16", "FLOAT32", "FLOAT64", "INT64", "UINT8"])
def test_an_element_type_has_the_name_that_nccl_gives_it(dtype: str) -> None:
    assert data_type(DType[dtype]) is DataType[dtype]


def test_what_nccl_has_no_name_for_has_none() -> None:
    assert data_type(DType.COMPLEX64) is None and data_type(DType.INT16) is None and data_type(DType.BOOL) is None
    assert operation(ReduceOp.BXOR) is None and operation(ReduceOp.MEAN) is Operation.AVERAGE


@pytest.mark.parametrize(
    ("count", "most", "parts"), [(0, 5, [(0, 0)]), (5, 5, [(0, 5)]), (11, 5, [(0, 5), (5, 5), (10, 1)])]
)
def test_a_long_vector_is_called_for_in_parts(count: int, most: int, parts: list[tuple[int, int]]) -> None:
    assert list(in_parts(count, most)) == parts
