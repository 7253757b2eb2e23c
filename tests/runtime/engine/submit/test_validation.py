"""What no rank of a group could mean is refused when it is described."""

from __future__ import annotations

import pytest
from tests.runtime.engine.compile.test_program import floats, gpu_topology, topology

from collectived_proto.errors import InvalidArgumentError, UnimplementedError
from collectived_proto.types import AllReduce, Broadcast, Collective, Compression, DType, Leaf, ReduceOp
from collectived_runtime.engine.submit.validation import check

GROUP = topology(1, 1).group
INT8 = Compression.INT8


@pytest.mark.parametrize("op", [op for op in ReduceOp if op not in (ReduceOp.SUM, ReduceOp.MEAN)])
def test_only_sums_and_means_can_be_compressed(op: ReduceOp) -> None:
    leaf = Leaf("", DType.INT32 if op.value.startswith("b") else DType.FLOAT32, (3,))
    asked = Collective(AllReduce(op), "*", (leaf,), compression=INT8)
    with pytest.raises(InvalidArgumentError, match=f'compression="int8" is for sums and means, not for .*{op.value}'):
        check(asked, GROUP)


@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.FLOAT16, DType.INT32, DType.COMPLEX64])
def test_only_float32_and_bfloat16_can_be_compressed(dtype: DType) -> None:
    leaves = Leaf("['a']", DType.BFLOAT16, (3,)), Leaf("['b']", dtype, (3,))
    asked = Collective(AllReduce(ReduceOp.SUM), "{'a': *, 'b': *}", leaves, compression=INT8)
    with pytest.raises(InvalidArgumentError, match=rf"\['b'\] is {dtype.label}\[3\], and compression"):
        check(asked, GROUP)


def test_nothing_is_compressed_on_gpus() -> None:
    group = gpu_topology(("CPU:0",), ("GPU:1",)).group
    with pytest.raises(UnimplementedError, match="for groups on CPU devices, and rank 1 is on .*GPU:1"):
        check(floats(3, compression=INT8), group)


def test_what_only_moves_values_may_ask_for_compression_in_vain() -> None:
    check(floats(3, operation=Broadcast(0), compression=INT8), GROUP)
    check(floats(3, compression=INT8), GROUP)
