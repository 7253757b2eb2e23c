"""JAX arrays through real daemons."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectived as cd

jax = pytest.importorskip("jax")
jnp: Any = jax.numpy


def test_nests_with_jax_arrays_are_reduced_and_broadcast_with_the_same_bits_on_all_ranks(two_workers: Any) -> None:
    def body(group: cd.Group) -> Any:
        value = {
            "w": jax.random.normal(jax.random.key(group.rank), (300, 70)),
            "b": [jnp.full((3,), group.rank, jnp.bfloat16), jnp.asarray(group.rank), None, np.ones(2)],
        }
        reduced = group.all_reduce("mean", value)
        sent = group.broadcast(value, root=1)
        later = group.all_reduce("sum", value["w"], async_op=True).result()
        for leaf in (reduced["w"], *reduced["b"][:2], sent["w"], *sent["b"][:2], later):
            assert isinstance(leaf, jax.Array)
        assert sent["b"][0].tolist() == [1, 1, 1] and sent["w"].dtype == jnp.float32
        assert reduced["b"][0].dtype == jnp.bfloat16 and reduced["b"][1] == 1.5
        return np.asarray(reduced["w"]), np.asarray(sent["w"]), np.asarray(later)

    everybody = [np.asarray(jax.random.normal(jax.random.key(rank), (300, 70))) for rank in range(4)]
    results = two_workers.run(4, body)
    assert np.allclose(results[0][0], np.mean(everybody, axis=0), atol=1e-6)
    assert np.array_equal(results[0][1], everybody[1])
    assert np.allclose(results[0][2], np.sum(everybody, axis=0), atol=1e-6)
    for result in results:
        assert all(np.array_equal(one, first) for one, first in zip(result, results[0], strict=True))


PROGRAM = """
import os, sys
os.environ["COLLECTIVED_NATIVE"] = sys.stdin.readline().strip()  # without a core results lie in worker memory
import jax, numpy as np
import collectived as cd

def write(array):
    try:
        array[0] = 7
    except (TypeError, ValueError) as error:
        return type(error).__name__
    return "written"

with cd.connect() as session, session.join() as group:
    memory = session.empty((1000,))
    memory[:] = 1
    shared, own = group.all_reduce("sum", memory), group.all_reduce("sum", np.ones(3))
    result = group.all_reduce("sum", jax.device_put(memory))
    print(write(shared), write(np.asarray(shared.reshape(10, 100))), write(own))
    print(write(result), write(np.asarray(result)), write(np.from_dlpack(result)))
    print(jax.jit(lambda x: x.at[0].set(7), donate_argnums=0)(result)[:2])
    print(group.all_reduce("sum", memory)[:2], flush=True)
"""


@pytest.mark.parametrize(
    ("core", "numpy"), [("", "written written written"), ("/nowhere", "ValueError ValueError written")]
)
def test_writing_to_a_result_of_numpy_or_jax_never_ends_the_process(one_worker: Any, core: str, numpy: str) -> None:
    client = one_worker.fresh_client(0, 1, f"written {core}", PROGRAM)
    output, errors = client.communicate(f"{core}\n", timeout=50)
    assert (client.returncode, errors) == (0, "")
    assert output.splitlines() == [
        numpy,
        "TypeError ValueError ValueError",
        "[7. 1.]",
        "[1. 1.]",
    ]
