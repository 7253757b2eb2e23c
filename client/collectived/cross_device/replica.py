"""The replica context: this process, or this thread of a strategy, as one of the replicas that work in step."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsIndex

from collectived.cross_device.device_sessions import default_session
from collectived.cross_device.ops import CrossDeviceOps, call_options
from collectived.cross_device.timeouts import start_deadline, with_remaining_timeout
from collectived.cross_device.values import DistributedValues, PerReplica
from collectived.errors import CollectiveError
from collectived.group import Group
from collectived.values import nest
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import ReduceOp


class ReplicaContext:
    """One replica among `num_replicas_in_sync`; see `get_replica_context`. Thread-safe.

    All replicas must make the same calls in the same order.
    """

    def __init__(self, join: Callable[[], Group]) -> None:
        self._join = join
        self._lock = threading.Lock()
        self._joined_group: Group | None = None

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica, from 0: its rank."""
        return self._group.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are."""
        return self._group.size

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """Combines the values of all replicas, element by element; see `Group.all_reduce`.

        Args:
            reduce_op: `ReduceOp` or text, such as "sum".
            value: arrays, numbers, `IndexedSlices` or None in any nest; the same structure, shapes and types on all
                replicas.
            options: of this call. experimental_hints: its older name.
            async_op: return a `Work` at once, whose `as_completed` gives leaves as they come.

        Returns:
            The result in the structure of `value`.

        Raises:
            TypeError, ValueError: an argument is wrong, or both `options` and `experimental_hints` are given.
            CollectiveError: the collective failed. If its `.rejoin` is True, `get_replica_context()` gives a new
                context, which joins again.
        """
        return self._group.all_reduce(
            reduce_op, value, options, async_op=async_op, experimental_hints=experimental_hints
        )

    def all_gather(self, value: Any, axis: SupportsIndex, options: CommunicationOptions | None = None) -> Any:
        """Joins the values of all replicas along `axis`, in their order; see `Group.all_gather`."""
        return self._group.all_gather(value, axis, options=options)

    @property
    def _group(self) -> Group:
        with self._lock:
            if self._joined_group is None:
                self._joined_group = self._join()
            return self._joined_group

    @property
    def _is_spent(self) -> bool:
        """Whether the group has ended and the caller has got the error."""
        if self._joined_group is None:
            return False
        standing = self._joined_group._channel.rank_state
        return bool(self._joined_group._unusable_reason) or (standing.is_over and standing.unreported_verdict is None)

    def _leave(self) -> None:
        if self._joined_group is not None:
            with contextlib.suppress(CollectiveError):
                self._joined_group.leave()

    def __repr__(self) -> str:
        return f"<ReplicaContext: {'not joined yet' if self._joined_group is None else self._joined_group!r}>"


class ProcessReplica(ReplicaContext):
    """This process as a replica of its default group, whatever becomes of that, with options of its own."""

    def __init__(self, options: CommunicationOptions) -> None:
        super().__init__(lambda: _get_process_context()._group)
        self._options = options

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """See `ReplicaContext`."""
        merged = self._options.merge(call_options(options, experimental_hints))
        return self._group.all_reduce(reduce_op, value, merged, async_op=async_op)

    def all_gather(self, value: Any, axis: SupportsIndex, options: CommunicationOptions | None = None) -> Any:
        """See `ReplicaContext`."""
        return self._group.all_gather(value, axis, options=self._options.merge(call_options(options, None)))

    @property
    def _group(self) -> Group:
        return self._join()


_lock = threading.Lock()
_process: ReplicaContext | None = None
_thread = threading.local()


def get_replica_context() -> ReplicaContext:
    """This replica: in `run` of a strategy the one of this thread, else this process.

    A process is a replica of its default group, which is joined at the context's first use from the environment that
    `collectived launch` sets. If that group has failed, and the error was raised here, this gives a new context.
    """
    current: ReplicaContext | None = getattr(_thread, "context", None)
    return _get_process_context() if current is None else current


def _get_process_context() -> ReplicaContext:
    global _process
    with _lock:
        if _process is not None and _process._is_spent:
            _process._leave()
            _process = None
        if _process is None:
            _process = ReplicaContext(lambda: default_session().join())
        return _process


def current_strategy() -> Any:
    """The strategy of whose `run` or `scope` this thread is in; None outside."""
    return getattr(_thread, "strategy", None)


@contextlib.contextmanager
def in_scope(strategy: object) -> Iterator[None]:
    """Make `strategy` this thread's."""
    before, _thread.strategy = current_strategy(), strategy
    try:
        yield
    finally:
        _thread.strategy = before


def is_in_replica() -> bool:
    """Whether this thread is a replica of a strategy."""
    return getattr(_thread, "context", None) is not None


@contextlib.contextmanager
def as_replica(context: ReplicaContext) -> Iterator[None]:
    """Make `context` this thread's replica."""
    _thread.context = context
    try:
        yield
    finally:
        _thread.context = None


def _after_fork_in_child() -> None:
    global _lock, _process
    _lock = threading.Lock()
    _process = None
    _thread.context = _thread.strategy = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class ReplicaBarrier:
    """Where the replicas of one run meet: what each gives, and what came of it.

    Args:
        ops: the operation of the strategy, chosen by the caller or by default.
        devices: of the replicas, in full.
    """

    def __init__(self, ops: CrossDeviceOps, devices: Sequence[str]) -> None:
        self.ops = ops
        self.devices = tuple(devices)
        self.contributions: list[tuple[nest.Spec, list[Any]]] = [(nest.NONE, [])] * len(self.devices)
        self.results: list[Any] | Exception = []

    def reduce(self, reduce_op: ReduceOp | str, options: CommunicationOptions) -> None:
        """Reduces what all have given, by the operation."""
        try:
            structures = [nest.structure(spec) for spec, _ in self.contributions]
            for replica, structure in enumerate(structures):
                if structure != structures[0]:
                    raise ValueError(f"replica {replica} gave {structure}, replica 0 {structures[0]} (* is a leaf)")
            leaves = zip(*(leaves for _, leaves in self.contributions), strict=True)
            values = [PerReplica(components, self.devices) for components in leaves]
            self.results = self.ops.batch_reduce(reduce_op, [(value, value) for value in values], options)
        except Exception as error:
            self.results = error


class StrategyReplica(ReplicaContext):
    """A replica of a strategy. An operation that is no plain all-reduce is carried out by replica 0, for all."""

    def __init__(self, group: Group, board: ReplicaBarrier) -> None:
        super().__init__(lambda: group)
        self._barrier = board

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        experimental_hints: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """See `ReplicaContext`."""
        ops = self._barrier.ops
        chosen = call_options(options, experimental_hints)
        terms = ops._make_terms(chosen, self._barrier.devices)
        if terms is None:
            return self._reduce_on_first(reduce_op, value, chosen, async_op)
        return self._group._all_reduce_packed(
            reduce_op,
            value,
            terms.options,
            all_reduce_spec=terms.all_reduce_spec,
            packing=terms.packing,
            async_op=async_op,
        )

    def _reduce_on_first(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions, async_op: bool
    ) -> Any:
        if async_op:
            raise ValueError(
                f"async_op is not offered with {type(self._barrier.ops).__name__}, which runs in this process"
            )
        group, board = self._group, self._barrier
        spec, leaves = nest.flatten(value)
        board.contributions[group.rank] = spec, leaves
        options, deadline = start_deadline(options)
        group.barrier(options)  # all have given
        if group.rank == 0:
            board.reduce(reduce_op, with_remaining_timeout(options, deadline))
        group.barrier(
            with_remaining_timeout(options, deadline)
        )  # it is reduced, and may be taken until all meet here again
        if isinstance(board.results, Exception):
            raise board.results
        mine = [one.values[group.rank] if isinstance(one, DistributedValues) else one for one in board.results]
        return nest.unflatten(spec, mine)
