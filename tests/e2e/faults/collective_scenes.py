"""Collectives amid which an error is planted, each of which says by its result of which step it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import collectived as cd

SOON = cd.CommunicationOptions(timeout_seconds=10)
LATE_SECONDS = 0.04  # for which a rank is kept waiting: longer than the core waits before it hands a call back
PACKED = cd.CommunicationOptions(bytes_per_pack=64, timeout_seconds=10)

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class Scene(NamedTuple):
    """A collective of rank 1 amid which an error is planted.

    Attributes:
        submit: with a value that is 1 on rank 0 and 2 on rank 1, times a number that differs from step to step;
            returns 3 times that number, made from what it has received.
        is_first: whether it is the first that its session has ever submitted.
        earlier: how many times the same has been submitted before in this generation.
        late: for how many seconds rank 0 keeps it waiting.
        is_async: whether the result is asked for by itself: who was not given it can ask for it again.
        beyond: the scene whose lines are left out here, for there they are reached sooner.
    """

    submit: Callable[[cd.Group, Array], Any]
    is_first: bool = False
    earlier: int = 0
    late: float = 0.0
    is_async: bool = False
    beyond: str = ""


def own_share(group: cd.Group, value: Array) -> float:
    """What is right of a call that brings this rank nothing."""
    return float(value[0]) / (group.rank + 1) * 3


def add(parts: Array | None, group: cd.Group, value: Array) -> float:
    """Of the values of both ranks, one after another; where this rank has been sent them."""
    return own_share(group, value) if parts is None else float(parts[0] + parts[-1])


def reduce(group: cd.Group, value: Array) -> Any:
    found = group.reduce("sum", value, 1)
    return own_share(group, value) if found is None else found[0]


def send_or_receive(sender: int, source: int | None = None) -> Callable[[cd.Group, Array], Any]:
    def submit(group: cd.Group, value: Array) -> Any:
        if group.rank == sender:
            group.send(value, 1 - sender)
            return own_share(group, value)
        return group.recv(source)[0] * 3 / (sender + 1)

    return submit


def receive_later(group: cd.Group, value: Array) -> Any:
    """Without waiting, and from whoever sends."""
    if group.rank == 0:
        group.send(value, 1)
        return own_share(group, value)
    return group.recv(async_op=True).result()[0] * 3


def reduce_nest(group: cd.Group, value: Array) -> Any:
    found: Any = group.all_reduce("sum", {"a": value, "b": [value[:1], float(value[0])]}, PACKED)
    assert found["a"][0] == found["b"][0][0] == found["b"][1]
    return found["b"][1]


def reduce_sparse(group: cd.Group, value: Array) -> Any:
    rows = cd.IndexedSlices(value[:2].reshape(2, 1), np.array([0, 1]), (4, 1))
    found: Any = group.all_reduce("sum", {"rows": rows, "whole": value})
    assert add(found["rows"].values[:, 0], group, value) == found["whole"][0]
    return found["whole"][0]


def reduce_into(group: cd.Group, value: Array) -> Any:
    into = np.empty_like(value)
    assert group.all_reduce("sum", value, SOON, out=into) is into
    return into[0]


def reduce_large(group: cd.Group, value: Array) -> Any:
    """More than a tick of a segment (4 MiB): over the doorbell, by memory that the session asks its worker for."""
    return group.all_reduce("sum", np.resize(value, 600_000 + len(value)), SOON)[0]


def reduce_in_worker_memory(group: cd.Group, value: Array) -> Any:
    """By arrays that the session asks its worker for: the first of a session brings the arena that holds them."""
    session: Any = group._session
    given, into = (session.empty(value.shape, value.dtype) for _ in range(2))
    given[:] = value
    group.all_reduce("sum", given, SOON, out=into)
    return float(into[0])


def wait_at_barrier(group: cd.Group, value: Array) -> Any:
    group.barrier()
    return own_share(group, value)


NEW = "of a new shape"
FIRST = "the first of a session"
REPEATED = "repeated"
ASYNCHRONOUS = "asynchronous"
LARGE = "large"
IN_WORKER_MEMORY = "in worker memory"
AGAIN = ", repeated"
WITH_OPTIONS = Scene(lambda group, value: group.all_reduce("sum", value, SOON)[0])
OTHERS: dict[str, Callable[[cd.Group, Array], Any]] = {
    "reduce": reduce,
    "broadcast from it": lambda group, value: group.broadcast(value, 1)[0] * 1.5,
    "broadcast to it": lambda group, value: group.broadcast(value if group.rank == 0 else None)[0] * 3,
    "all_gather": lambda group, value: add(group.all_gather(value), group, value),
    "gather at it": lambda group, value: add(group.gather(value, 1), group, value),
    "gather elsewhere": lambda group, value: add(group.gather(value), group, value),
    "scatter from it": lambda group, value: group.scatter(value, 1)[0] * 1.5,
    "scatter to it": lambda group, value: group.scatter(value)[0] * 3,
    "reduce_scatter": lambda group, value: group.reduce_scatter("sum", value)[0],
    "all_to_all": lambda group, value: add(group.all_to_all(value), group, value),
    "barrier": wait_at_barrier,
    "send": send_or_receive(1),
    "receive": send_or_receive(0, 0),
    "receive from any": send_or_receive(0),
    "receive from any, asynchronous": receive_later,
    "nest in packs": reduce_nest,
    "sparse": reduce_sparse,
    "out": reduce_into,
}
REPEATABLE = ("broadcast from it", "all_gather", "barrier", "send", "receive from any")
SCENES = {
    NEW: WITH_OPTIONS,
    FIRST: WITH_OPTIONS._replace(is_first=True, beyond=NEW),
    "that waits": WITH_OPTIONS._replace(late=LATE_SECONDS, beyond=NEW),
    REPEATED: Scene(lambda group, value: group.all_reduce("sum", value)[0], earlier=1),
    ASYNCHRONOUS: Scene(lambda group, value: group.all_reduce("sum", value, async_op=True).result()[0], is_async=True),
}
SCENES |= {
    LARGE: Scene(reduce_large, beyond=NEW),
    f"{LARGE}, {FIRST}": Scene(reduce_large, is_first=True, beyond=LARGE),
    IN_WORKER_MEMORY: Scene(reduce_in_worker_memory, beyond="out"),
    f"{IN_WORKER_MEMORY}, {FIRST}": Scene(reduce_in_worker_memory, is_first=True, beyond=IN_WORKER_MEMORY),
}
SCENES["repeated, that waits"] = SCENES[REPEATED]._replace(late=LATE_SECONDS, beyond=REPEATED)
SCENES |= {name: Scene(submit, is_async=submit is receive_later, beyond=NEW) for name, submit in OTHERS.items()}
SCENES["barrier"] = Scene(wait_at_barrier, is_first=True, beyond=FIRST)  # has no shape, and so is new but once
SCENES |= {name + AGAIN: Scene(OTHERS[name], earlier=1, beyond=REPEATED) for name in REPEATABLE}
