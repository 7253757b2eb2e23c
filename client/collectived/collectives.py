"""The collectives of a group, as users call them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, SupportsIndex

from collectived.arguments import check_integer
from collectived.calls.prepare import ANY_VALUE, CrossDeviceTerms
from collectived.values.axes import check_axis, check_sizes
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Gather,
    Operation,
    Packing,
    Recv,
    Reduce,
    ReduceOp,
    ReduceScatter,
    Scatter,
    Send,
    Tier,
)

_BARRIER = Barrier()
_MAX_TAG = (1 << 32) - 1


class Collectives(ABC):
    """What follows holds for all of them.

    - All ranks call the same collectives in the same order. Where the operation, its arguments, structure, shapes or
      dtypes differ, all of them get an `InvalidArgumentError` that says how. Two calls that are alike in all of these
      cannot be told apart: where ranks swap them, their values are combined as they come.
    - A *value* is an array or number, or any nest of lists, tuples, namedtuples and dicts of such, None and
      `IndexedSlices`. A result has its structure, dtypes and kinds of arrays.
    - Results are arrays of their own, row-major, which nobody else looks into; but where NumPy arrays lie in memory
      from `session.empty`, their results are read-only views that the ranks of this host share.
    - `out` is a nest of the result's structure, whose arrays take the result in any byte order, and which is returned.
      It may be the value itself; it has no `IndexedSlices`. Where a rank gets no result it is not looked at. With
      `async_op` it is filled once the `Work` is done. An error whose `out_intact` is True, and every plain `TypeError`
      and `ValueError`, leaves it as it was. What others send is known only when it has come: where it does not fit,
      that is a `ValueError` of this rank alone, the result is lost, and the group goes on.
    - A blocking call returns when nobody reads its inputs any more. With `async_op=True` it returns a `Work` at once.
    - `options` go over the group's. `experimental_hints` is their deprecated name.
    - A value travels in at most 4096 packs; where arrays are cut or joined, each array is a pack of its own.
    - A plain `TypeError` or `ValueError` tells of wrong arguments of this rank alone: it has started nothing, and the
      others, which are told nothing, wait for it. Any `CollectiveError` tells of a collective that failed on all
      ranks, and its class what comes next; but `ResourceExhaustedError` without a verdict (the worker has no memory for
      inputs) is this rank's alone.
    """

    rank: int
    size: int

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Combines the values of all ranks, element by element; every rank gets the same bits.

        Args:
            reduce_op: `"sum"`, `"mean"` or another `ReduceOp`; the mean of integers is floating.
            value: the same structure, shapes and dtypes on all ranks; no bool, and what has no order has no minimum.
                Of `IndexedSlices` every rank gets the rows of all, in order of rank, as many as each has: their sum, or
                with `"mean"` divided by the number of ranks.
            options: for this call, over the group's; its timeout is in seconds.
            async_op: return a `Work` at once.
            out: a nest of the same structure whose arrays take the result; may be `value` itself.
            experimental_hints: deprecated name of `options`.

        Returns:
            `out`, or the result in the structure of `value`: arrays of their own, or, for NumPy arrays from
            `session.empty`, read-only views that the ranks of this host share. With `async_op`, a `Work`.

        Raises:
            TypeError, ValueError: an argument is wrong.
            CollectiveError: the collective failed; the class says what comes next.
        """
        return self._start(self._all_reduce_operation(reduce_op), value, options, experimental_hints, async_op, out)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        root: int = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """As `all_reduce`, but only `root` gets the result; the others get None, whatever `out` they give."""
        operation = Reduce(ReduceOp.of(reduce_op), self._check_rank(root, "root"))
        return self._start(operation, value, options, experimental_hints, async_op, out)

    def broadcast(
        self,
        value: Any,
        root: int = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Gives every rank the value of `root`.

        Args:
            value: on `root`, what is sent, of any dtype. On other ranks a template, whose structure, shapes and dtypes
                must be the same (so `IndexedSlices` must have as many rows), and whose kinds of arrays the result has;
                or None: whatever comes is taken.

        Returns:
            The value of `root`. Where `value` was None, its arrays are NumPy arrays, its numbers NumPy scalars, and its
            containers lists, tuples, namedtuples of that name and dicts.

        Raises:
            InvalidArgumentError: a template is unlike the value.
            ValueError: on this rank alone: None was given, and a dict of the value has keys that are no literals of
                Python. The value is lost; the group goes on.
        """
        root = self._check_rank(root, "root")
        given = ANY_VALUE if value is None and root != self.rank else value
        return self._start(Broadcast(root), given, options, experimental_hints, async_op, out)

    def all_gather(
        self,
        value: Any,
        axis: SupportsIndex = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Joins the arrays of all ranks along `axis`, in order of rank; every rank gets all.

        Args:
            value: at most 4096 arrays of at least one axis and any dtype; lengths along `axis` may differ between
                ranks, and be 0, everything else must be the same.
            axis: negative ones count from the end.

        Returns:
            The structure of `value`; an array of shape [2, 3] becomes one of [2 * size, 3] if all ranks have such.

        Raises:
            InvalidArgumentError: an array is 0-d, on whichever rank: all of them are told.
            ValueError: an array has no such axis, or there are too many.
        """
        return self._start(AllGather(check_axis(axis)), value, options, experimental_hints, async_op, out)

    def gather(
        self,
        value: Any,
        root: int = 0,
        axis: SupportsIndex = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """As `all_gather`, but only `root` gets the result; the others get None, whatever `out` they give."""
        operation = Gather(self._check_rank(root, "root"), check_axis(axis))
        return self._start(operation, value, options, experimental_hints, async_op, out)

    def scatter(
        self,
        value: Any,
        root: int = 0,
        axis: SupportsIndex = 0,
        sizes: Iterable[SupportsIndex] | None = None,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Cuts the arrays of `root` along `axis` and gives each rank its piece, the first one to rank 0.

        Args:
            value: on `root`, at most 4096 arrays of at least one axis and any dtype. On other ranks it is not looked
                at.
            axis: the same on all ranks.
            sizes: on `root`, how many rows each rank gets; they add up to the length of every array along `axis`.
                None: as even as possible, one more for the first ranks where it does not divide. Not looked at
                elsewhere.

        Returns:
            This rank's piece, in the structure of root's value; on other ranks than `root` as NumPy arrays.

        Raises:
            ValueError: an array is 0-d, has no such axis, `sizes` do not add up to its length, or there are too many.
        """
        root = self._check_rank(root, "root")
        if self.rank != root:
            operation = Scatter(root, check_axis(axis))
            return self._start(operation, ANY_VALUE, options, experimental_hints, async_op, out)
        operation = Scatter(root, check_axis(axis), check_sizes(sizes, self.size))
        return self._start(operation, value, options, experimental_hints, async_op, out)

    def reduce_scatter(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: SupportsIndex = 0,
        sizes: Iterable[SupportsIndex] | None = None,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Combines the values of all ranks as `all_reduce` does, and gives each rank its piece along `axis`.

        Args:
            reduce_op: `"sum"`, `"mean"` or another `ReduceOp`; the mean of integers is floating.
            value: at most 4096 arrays of at least one axis; the same structure, shapes and dtypes on all ranks; no
                bool.
            sizes: how many rows each rank gets, the same on all ranks; they add up to the length of every array along
                `axis`. None: as even as possible, one more for the first ranks where it does not divide.

        Returns:
            The structure of `value`, with this rank's rows.

        Raises:
            ValueError: an array is 0-d, has no such axis, `sizes` do not add up to its length, or there are too many.
        """
        operation = ReduceScatter(ReduceOp.of(reduce_op), check_axis(axis), check_sizes(sizes, self.size))
        return self._start(operation, value, options, experimental_hints, async_op, out)

    def all_to_all(
        self,
        value: Any,
        axis: SupportsIndex = 0,
        sizes: Iterable[SupportsIndex] | None = None,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Cuts the arrays of every rank along `axis`, sends piece r to rank r, and joins what comes by sender.

        Args:
            value: at most 4096 arrays of at least one axis and any dtype; with `sizes`, lengths along `axis` may differ
                between ranks.
            sizes: how many of this rank's rows go to each rank; they add up to the length of every array along `axis`.
                Every rank gives its own, or none does. None: as even as possible, one more for the first ranks where
                it does not divide.

        Returns:
            The structure of `value`: along `axis` the piece from rank 0, then that from rank 1, and so on.

        Raises:
            ValueError: an array is 0-d, has no such axis, `sizes` do not add up to its length, or there are too many.
        """
        operation = AllToAll(check_axis(axis), check_sizes(sizes, self.size))
        return self._start(operation, value, options, experimental_hints, async_op, out)

    def send(
        self,
        value: Any,
        to: int,
        tag: int = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Sends a value to one rank, which calls `recv`; any dtype. Other ranks take no part.

        What one rank sends another one under one tag arrives in order. Sends and recvs are numbered apart from the
        group's other collectives; 65536 of them may be in flight.

        Args:
            to: a rank of this group; this rank itself, too, if it also receives: with `async_op` in one of the two.
            tag: 0 to 2**32 - 1; a recv takes only what was sent under its tag.

        Returns:
            None, when nobody reads the value any more; with `async_op`, a `Work`.
        """
        operation = Send(self._check_rank(to, "to"), self._check_tag(tag))
        return self._start(operation, value, options, experimental_hints, async_op)

    def recv(
        self,
        source: int,
        tag: int = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Receives what `source` sends to this rank under `tag`; see `send`.

        Args:
            out: a nest whose arrays take the value; its structure, shapes and dtypes must be those of what comes.

        Returns:
            `out`, or the value: its arrays as NumPy arrays, its numbers as NumPy scalars, its containers as lists,
            tuples, namedtuples of that name and dicts. With `async_op`, a `Work` for it.

        Raises:
            ValueError: on this rank alone, what came does not fit `out`; or, without `out`, a dict of the value has
                keys that are no literals of Python. The value is lost; the group goes on.
        """
        operation = Recv(self._check_rank(source, "source"), self._check_tag(tag))
        return self._start(operation, ANY_VALUE, options, experimental_hints, async_op, out)

    def barrier(
        self,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Ends when all ranks have called it; None, or a `Work` with `async_op`."""
        return self._start(_BARRIER, None, options, experimental_hints, async_op)

    def _all_reduce_packed(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None,
        *,
        all_reduce_spec: tuple[Tier, ...] = (),
        packing: Packing | None = None,
        async_op: bool = False,
    ) -> Any:
        """`all_reduce` by algorithms and in packs that a cross-device operation chooses."""
        special = CrossDeviceTerms(all_reduce_spec, packing)
        return self._start(self._all_reduce_operation(reduce_op), value, options, None, async_op, special=special)

    @abstractmethod
    def _start(
        self,
        operation: Operation,
        value: Any,
        options: CommunicationOptions | None,
        hints: CommunicationOptions | None,
        async_op: bool,
        out: Any = None,
        special: CrossDeviceTerms | None = None,
    ) -> Any:
        """Start a collective and, unless `async_op`, wait for its result; a value of `ANY_VALUE` takes what comes."""

    @abstractmethod
    def _all_reduce_operation(self, reduce_op: ReduceOp | str) -> AllReduce:
        """The operation, remembered, for this one is to be quick."""

    def _check_rank(self, rank: int, name: str) -> int:
        return check_integer(rank, name, 0, self.size - 1, f"a rank of this group, 0 to {self.size - 1}")

    def _check_tag(self, tag: int) -> int:
        return check_integer(tag, "tag", 0, _MAX_TAG, f"a whole number from 0 to {_MAX_TAG}")
