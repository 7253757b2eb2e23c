"""Gradients of PyTorch's DistributedDataParallel, averaged over a group.

model = DistributedDataParallel(model)
model.register_comm_hook(None, cd.integrations.torch.allreduce_hook(group))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectived.group import Group
from collectived.integrations.futures import Future, complete_future, make_future, queue_after_backward
from collectived.values.leaves import writable_view
from collectived.work import peek_failure
from collectived_proto.options import CommunicationOptions

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
        float32 or float64 on the CPU or a GPU, to a future of the bucket's buffer, which then holds the mean.

    Raises:
        CollectiveError: by `backward()`, if a collective has failed; the gradients are then invalid. The
            futures raise it too. The model can go on where the group can, else wrap it again for a new group.
        TypeError: by `backward()`, if a bucket is sparse, or on another kind of device.
    """

    def hook(state: object, bucket: Any) -> Future:
        gradients = bucket.buffer()
        future = make_future(gradients)
        try:
            array = gradients if gradients.is_cuda else writable_view(gradients)
            work = group.all_reduce("mean", array, options, async_op=True, out=array)
        except Exception as error:
            complete_future(future, gradients, error)
            queue_after_backward(future, lambda: None)
        else:
            work.add_done_callback(lambda work: complete_future(future, gradients, peek_failure(work), work.result))
            queue_after_backward(future, work.exception)
        return future

    hook.__annotations__.clear()  # DDP compares them with its classes, and takes texts for wrong ones
    return hook
