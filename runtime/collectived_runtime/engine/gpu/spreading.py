"""The same bytes to several places on one GPU: by a kernel, which reads them once, where they lie by whole words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from collectived_proto.types import DType, ReduceOp
from collectived_runtime.device.cuda.driver import Cuda, FoldSpec
from collectived_runtime.device.cuda.kernels import MOST_OUTPUTS
from collectived_runtime.device.launch_thread import Work

WORDS = (DType.INT64, DType.INT32)  # narrower ones take a kernel longer than copies


def make_move_spec(word: DType) -> FoldSpec:
    """A fold that leaves words as they are, of one source."""
    return FoldSpec(ReduceOp.BOR, word, word, 1, widen=False, finish=False)


def plan_copies(cuda: Cuda, source: int, targets: Sequence[int], nbytes: int) -> list[Work]:
    """The works that copy `nbytes` at an address to each of `targets`."""
    if not nbytes:
        return []
    word = next((one for one in WORDS if all(at % one.itemsize == 0 for at in (source, nbytes, *targets))), None)
    if len(targets) == 1 or word is None:
        return [partial(cuda.copy, target, source, nbytes) for target in targets]
    return [
        partial(
            cuda.fold, make_move_spec(word), [source], targets[first : first + MOST_OUTPUTS], nbytes // word.itemsize
        )
        for first in range(0, len(targets), MOST_OUTPUTS)
    ]
