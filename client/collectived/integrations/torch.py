"""Gradients of PyTorch's DistributedDataParallel, averaged over a group.

model = DistributedDataParallel(model)
model.register_comm_hook(None, cd.integrations.torch.allreduce_hook(group))
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from collectived import call_site
from collectived.group import Group
from collectived.values.leaves import writable_view
from collectived.work import Work
from collectived_proto.options import CommunicationOptions

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{__name__} needs PyTorch: pip install 'collectived[torch]'", name="torch") from error

call_site.skip_frames_under(os.path.dirname(torch.__file__))

Future = Any  # torch.futures.Future of a tensor
Hook = Callable[[object, Any], Future]


def allreduce_hook(group: Group, options: CommunicationOptions | None = None) -> Hook:
    """A hook for `DistributedDataParallel.register_comm_hook` that averages gradients over `group`.

    The group's ranks must be those of DDP's own process group, which goes on to hand out the first weights. Reduction
    runs beside the backward pass, one collective per bucket, and never outlasts `backward()`.

    Args:
        group: one member per process of DDP.
        options: for every bucket, over the group's; a timeout is worth giving.

    Returns:
        The hook: from a state, which it leaves alone, and a `torch.distributed.GradBucket` of float16, bfloat16,
        float32 or float64 on the CPU, to a future of the bucket's buffer, which then holds the mean.

    Raises:
        CollectiveError: by `backward()`, where a collective has failed; the gradients are worth nothing then. The
            futures raise it too. The model can go on where the group can, else wrap it again for a new group.
        TypeError: by `backward()`, where a bucket is not on the CPU.
    """

    def hook(state: object, bucket: Any) -> Future:
        gradients = bucket.buffer()
        future: Future = torch.futures.Future()
        try:
            array = writable_view(gradients)
            work = group.all_reduce("mean", array, options, async_op=True, out=array)
        except Exception as error:
            _fail(future, gradients, error)
            _queue_after_backward(future, None)
        else:
            work.add_done_callback(lambda work: _settle(future, gradients, work))
            _queue_after_backward(future, work)
        return future

    hook.__annotations__.clear()  # DDP compares them with its classes, and takes texts for wrong ones
    return hook


def _settle(future: Future, gradients: Any, work: Work[Any]) -> None:
    try:
        work.result()
    except Exception as error:
        _fail(future, gradients, error)
    else:
        future.set_result(gradients)


def _fail(future: Future, gradients: Any, error: Exception) -> None:
    """Has `future` raise `error`, but not in the reducer of DDP.

    The reducer takes the value without asking whether it is an error: of what `set_exception` leaves it makes "unable
    to cast to Tensor", and stays in the middle of its step. So it gets a tensor.
    """

    def give(_: object) -> None:
        raise error

    future._set_unwrap_func(give)  # the half of `set_exception` that makes value() and wait() raise
    future.set_result(gradients)


def _queue_after_backward(future: Future, work: Work[Any] | None) -> None:
    """Waits for `work` where Ctrl-C is heard, before the reducer would, and raises what is wrong, after it is through.

    Callbacks run at the end of a backward pass in the order in which they were queued; the reducer queues its own after
    the last bucket, hence the second step.
    """
    engine = torch.autograd.Variable._execution_engine

    def wait() -> None:
        if work is not None:
            work.exception()
        engine.queue_callback(future.wait)

    with contextlib.suppress(RuntimeError):  # no backward pass is running: whoever calls the hook has the future
        engine.queue_callback(wait)
