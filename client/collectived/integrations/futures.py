"""Futures of PyTorch that fail without ending the process, and are waited for at the end of a backward pass."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from collectived import call_site

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "collectived.integrations.torch needs PyTorch: pip install 'collectived[torch]'", name="torch"
    ) from error

Future = Any  # torch.futures.Future of a tensor, or of a list of such

call_site.skip_frames_under(os.path.dirname(torch.__file__))
call_site.name_frameless("DDP backward")  # of threads of autograd, and of callbacks of futures

_settling = threading.local()  # `.depth` > 0: this thread calls what hangs on futures


def make_future(tensors: Any = ()) -> Future:
    """A future of tensors. Where some lie on GPUs, streams wait for its value.

    A thread that waits for the future, and a callback of it, has streams of its own. They wait for the work on the
    streams of the thread that set the value.

    Args:
        tensors: a tensor, or lists of such, one within the other.
    """
    devices = sorted(gpus_of(tensors), key=lambda device: device.index)
    return torch.futures.Future(devices=devices) if devices else torch.futures.Future()


def gpus_of(tensors: Any) -> set[Any]:
    """The GPUs on which some of these tensors lie, in lists or not."""
    if isinstance(tensors, torch.Tensor):
        return {tensors.device} if tensors.is_cuda else set()
    return set().union(*map(gpus_of, tensors)) if isinstance(tensors, (list, tuple)) else set()


def is_settling() -> bool:
    """Whether this thread calls what hangs on a future. These are called one after another."""
    return getattr(_settling, "depth", 0) > 0


def complete_future(
    future: Future, tensors: Any, failure: Exception | None = None, collect: Callable[[], object] | None = None
) -> None:
    """Give `future` its value, or have it raise `failure`, but not in the reducer of DDP.

    The reducer takes the value without asking whether it is an error: of what `set_exception` leaves it makes "unable
    to cast to Tensor", or ends the process. So it gets `tensors`.

    Garbage collection does not see what a future holds, so whatever it is given must not hold the future.

    Args:
        collect: has the caller given the failure, and raises it. From then on the group goes on, where it does. That
            must be at a point of the caller's program, the same on all ranks, so what hangs on the future does without.
    """
    if failure is not None:  # the half of `set_exception` that makes value() and wait() raise
        future._set_unwrap_func(partial(_give, _copy_error(failure), collect))
    _settling.depth = getattr(_settling, "depth", 0) + 1
    try:
        future.set_result(tensors)
    finally:
        _settling.depth -= 1


def _give(failure: Exception, collect: Callable[[], object] | None, _: object) -> None:
    if collect is not None and not is_settling():
        collect()
    raise _copy_error(failure)


def _copy_error(error: Any) -> Any:
    """The same without a traceback, for that holds frames, and these the future that is waited for."""
    made = copy.copy(error)
    made.__cause__ = error.__cause__ and _copy_error(error.__cause__)
    return made


def queue_after_backward(future: Future, wait: Callable[[], object]) -> None:
    """Call `wait` where Ctrl-C can interrupt it, before the reducer would wait, and raise its error afterwards.

    Callbacks run at the end of a backward pass in the order in which they were queued; the reducer queues its own after
    the last bucket, hence the second step. Outside of a backward pass nothing is queued: the caller has the future.
    """
    engine = torch.autograd.Variable._execution_engine

    def wait_then_raise() -> None:
        wait()
        engine.queue_callback(future.wait)

    with contextlib.suppress(RuntimeError):  # no backward pass is running
        engine.queue_callback(wait_then_raise)
