"""Leaves of other libraries: seen where they lie, given back as what they were, refused with a word on what to do."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectived as cd
from collectived.values import leaves

jax = pytest.importorskip("jax")
jnp: Any = jax.numpy


class Strange:
    """An array of a library that nobody knows, whose elements lie in a NumPy array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, *, stream: object = None, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class Standard(Strange):
    """One that follows the array API standard."""

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda array: Standard(np.from_dlpack(array)))


class OnGpu(Strange):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class OnMetal(Strange):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (8, 0)


class Cuda:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    "dtype",
    ["float16", "bfloat16", "float32", "int8", "int16", "int32", "uint8", "uint16", "uint32", "complex64"],
)
def test_jax_arrays_come_back_as_jax_arrays(make: Any, dtype: str) -> None:
    value = {"a": jnp.arange(6, dtype=dtype).reshape(2, 3), "b": [jnp.asarray(2, dtype), None, np.ones(2)]}
    result = make(size=3).group.all_reduce("sum", value)
    assert isinstance(result["a"], jax.Array) and isinstance(result["b"][0], jax.Array)
    assert result["a"].dtype == dtype and result["a"].tolist() == [[0, 3, 6], [9, 12, 15]]
    assert result["b"][0].shape == () and result["b"][0] == 6
    assert type(result["b"][2]) is np.ndarray


def test_jax_booleans_are_broadcast(make: Any) -> None:
    assert make().group.broadcast(jnp.array([True, False])).tolist() == [True, False]


def test_the_mean_of_jax_integers_is_floating(make: Any) -> None:
    result = make().group.all_reduce("mean", jnp.arange(3))
    assert jnp.issubdtype(result.dtype, jnp.floating) and result.tolist() == [0, 1, 2]


def test_jax_arrays_are_read_where_they_lie(make: Any) -> None:
    value = jnp.ones(1000)
    array = leaves.kind_of(value).to_array(value)
    assert array.__array_interface__["data"][0] == value.unsafe_buffer_pointer()


def test_a_jax_array_over_worker_memory_goes_in_without_a_copy_and_comes_back_in_memory_of_its_own(make: Any) -> None:
    setting = make()
    memory = setting.memory.empty((1000,), np.dtype(np.float32))
    memory[:] = 1
    value = jax.device_put(memory)
    assert value.unsafe_buffer_pointer() == memory.__array_interface__["data"][0], "JAX shares aligned host memory"
    result = setting.group.all_reduce("sum", value)
    assert [ring.staged for ring in setting.far.rings] == [False]
    assert isinstance(result, jax.Array) and result.tolist() == [2] * 1000
    view = setting.group.all_reduce("sum", memory)
    assert not np.shares_memory(np.asarray(result), view) and not np.shares_memory(np.asarray(result), memory)


def test_a_jax_array_whose_data_are_gone_is_refused(make: Any) -> None:
    value = jnp.ones(3)
    value.delete()
    with pytest.raises(TypeError, match=r"\['a'\] is a JAX array whose elements cannot be had: .*deleted"):
        make().group.all_reduce("sum", {"a": value})


def test_random_keys_of_jax_are_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"the value is a PRNGKeyArray: send jax.random.key_data\(key\)"):
        make().group.broadcast(jax.random.key(0))


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad], ids=["jit", "vmap", "grad"])
def test_what_jax_is_tracing_is_refused(make: Any, transform: Any) -> None:
    group = make().group
    value = jnp.ones(2) if transform is jax.vmap else 1.0
    with pytest.raises(TypeError, match="Tracer: it stands for values yet to come: call collectives outside of jit"):
        transform(lambda x: group.all_reduce("sum", x))(value)


def test_jax_dtypes_that_collectives_do_not_carry_are_refused(make: Any) -> None:
    with pytest.raises(TypeError, match="the value has dtype float8_e4m3fn: expected one of bool"):
        make().group.all_reduce("sum", jnp.ones(2, jnp.float8_e4m3fn))


def test_what_follows_the_array_standard_comes_back_by_its_own_from_dlpack(make: Any) -> None:
    value = Standard(np.arange(6.0).reshape(2, 3))
    result = make(size=2).group.all_reduce("sum", [value])[0]
    assert type(result) is Standard and result.array.tolist() == [[0, 2, 4], [6, 8, 10]]
    result.array[:] = 9
    assert value.array[0, 1] == 1


def test_what_speaks_dlpack_without_a_way_back_comes_back_as_a_numpy_array(make: Any) -> None:
    result = make(size=2).group.all_reduce("sum", Strange(np.ones((), np.int16)))
    assert type(result) is np.ndarray and result.shape == () and result == 2 and result.flags.writeable


def test_dlpack_over_worker_memory_goes_in_without_a_copy(make: Any) -> None:
    setting = make()
    memory = setting.memory.empty((100,), np.dtype(np.float64))
    memory[:] = 1
    assert type(setting.group.all_reduce("sum", Strange(memory[10:]))) is np.ndarray
    assert [ring.staged for ring in setting.far.rings] == [False]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            OnMetal(np.ones(2)),
            r"a .*\.OnMetal on a device of DLPack's kind 8: .*; send a copy on the host",
        ),
        (
            OnGpu(np.ones(2)),
            r"a OnGpu on a GPU whose elements cannot be had: .* device of DLPack's kind 1",
        ),
        (Cuda(), r"the value is a Cuda on a GPU whose elements cannot be had: 'shape'"),
        (np.ndarray, "the value is a builtins.type: expected NumPy arrays"),
        (Strange(np.ones(2, ">f4")), r"Strange, which numpy.from_dlpack refuses: .*; send it as a NumPy array"),
    ],
    ids=["DLPack elsewhere", "DLPack that lies", "CUDA array interface", "a class", "refused by NumPy"],
)
def test_what_dlpack_does_not_give_is_refused(make: Any, value: Any, says: str) -> None:
    setting = make()
    with pytest.raises(TypeError, match=says):
        setting.group.all_reduce("sum", value)
    assert setting.far.rings == []


@pytest.mark.parametrize("value", [jnp.ones(2), Strange(np.ones(2)), np.ones(2), 1.5], ids=lambda v: type(v).__name__)
def test_a_kind_is_found_once_per_class(value: Any) -> None:
    known = leaves.kind_of(value), leaves._by_type[type(value)]
    assert known == (leaves.kind_of(value), leaves._by_type[type(value)])


def test_a_view_to_write_into_is_given_of_numpy_arrays() -> None:
    array = np.zeros((2, 3))[:, ::2]
    leaves.writable_view(array)[...] = 5
    assert array.tolist() == [[5, 5], [5, 5]]
    with pytest.raises(ValueError, match="read-only: it cannot be written"):
        leaves.writable_view(np.broadcast_to(1.0, 3))
    for other in (1.0, np.float32(1), jnp.ones(2), Strange(np.ones(2))):
        with pytest.raises(leaves.UnknownLeaf, match="expected a NumPy array, a PyTorch tensor or a CuPy array"):
            leaves.writable_view(other)


def test_worker_memory_takes_shape_and_dtype_from_what_it_is_to_be_like(worker: Any) -> None:
    with cd.connect(worker.address) as session, session.join("train", 2, rank=0):
        like = np.zeros((2, 3), ml_dtypes.bfloat16)
        for array, shape, dtype in (
            (session.empty(like=like), (2, 3), like.dtype),
            (session.empty(4, like=like), (4,), like.dtype),
            (session.empty(dtype="int8", like=like), (2, 3), "int8"),
            (session.empty((2,), like=np), (2,), "float32"),
            (session.empty((2,)), (2,), "float32"),
            (session.empty((), np.int64), (), "int64"),
            (session.empty(like=np.zeros(3, ">i4")), (3,), "int32"),
        ):
            assert type(array) is np.ndarray and array.shape == shape and array.dtype == dtype
            assert session._memory.locate(array) is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "shape is missing: give lengths, or an array as like"),
        ({"like": np}, "shape is missing"),
        ({"shape": 2, "like": jnp.ones(3)}, "like is of JAX, whose arrays are never written: take a NumPy array"),
        ({"shape": 2, "like": jax}, "like is of JAX"),
        ({"shape": 2, "like": sys}, "like is the module sys: expected an array, or one of the modules jax, jax.numpy"),
        ({"shape": 2, "like": 1.5}, "like is a float: expected an array, or the module of a library"),
        ({"shape": 2, "like": "x"}, "like is a str: text"),
        ({"shape": 2, "dtype": "datetime64[s]"}, "expected one of bool"),
    ],
    ids=str,
)
def test_worker_memory_like_nothing_that_could_look_into_it_is_refused(
    worker: Any, arguments: dict[str, Any], says: str
) -> None:
    with cd.connect(worker.address) as session, pytest.raises(TypeError, match=says):
        session.empty(**arguments)


def test_neither_importing_nor_numpy_leaves_bring_any_other_library() -> None:
    program = (
        "import sys, numpy, collectived; from collectived import integrations; from collectived.values import leaves\n"
        "leaves.kind_of(numpy.ones(2)), leaves.kind_of(1), leaves.make_template(numpy)\n"
        "print([name for name in ('torch', 'jax', 'cupy', 'tensorflow') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert ended.stdout == "[]\n"


def test_an_integration_without_its_library_says_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None; from collectived import integrations; integrations.torch"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert "ModuleNotFoundError: collectived.integrations.torch needs PyTorch: pip install" in ended.stderr
