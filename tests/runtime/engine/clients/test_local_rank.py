"""Where the value of a submission lies, and its result: every bound is checked before anything is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from collectived_proto.ipc import messages
from collectived_proto.types import Broadcast, Collective, DType, Leaf
from collectived_runtime.device.gpus import Region
from collectived_runtime.engine.clients.local_rank import InputBuffers


def test_who_contributes_nothing_may_say_where_its_result_goes_on_a_gpu() -> None:
    collective = Collective(Broadcast(1), "*", (Leaf("", DType.FLOAT32, (4,)),), site="test.py:1")
    prepared: Any = SimpleNamespace(op="broadcast", collective=collective, leaf_bytes=(16,), device_bytes=16)
    gpu: Any = object()
    told = messages.Submit(1, 1, 0, 0.0, False, (), output=(3, 0))

    def look(arena: int, offset: int, size: int) -> Region:
        return Region(gpu, 4096 + offset, size, None)

    found = InputBuffers(look, prepared, told, contributes=False)
    assert found.is_on_device and found.output is not None and found.output.address == 4096
