"""The collectives of a group, as users call them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal, SupportsIndex, Unpack, overload

from collectived import operations
from collectived.arguments import Options, ResultTerms, Terms, with_timeout
from collectived.calls.prepare import ANY_VALUE
from collectived.reductions import Reductions, Sizes, T
from collectived.values.axes import check_sizes
from collectived.work import Work
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import Barrier

_BARRIER = Barrier()


class Collectives(Reductions):
    """These rules hold for all collectives.

    - All ranks call the same collectives in the same order. If the operation, its arguments, structure, shapes or
      dtypes differ, all ranks get an `InvalidArgumentError` that says how. Two calls that are equal in all of these
      cannot be distinguished: if ranks swap them, their values are combined nevertheless.
    - A *value* is an array or number, or any nest of lists, tuples, namedtuples and dicts of such, None and
      `IndexedSlices`. A result has its structure, dtypes and kinds of arrays, and for type checkers its type, though
      the mean of an `int` is a `float`.
    - Results are separate arrays, row-major, which no other rank reads or writes. There is one exception: in groups of
      several workers, results of NumPy arrays from `session.empty` may be read-only views that ranks of a host share.
    - `out` is a nest of the result's structure. Its arrays take the result in any byte order, and it is returned. It
      may be the value itself; it has no `IndexedSlices`. On a rank without a result it is not used. With `async_op` it
      is filled once the `Work` is done. An error whose `out_intact` is True, or a plain `TypeError` or `ValueError`,
      leaves it as it was. The values of other ranks are known only when they have arrived: if one does not fit, that is
      a `ValueError` of this rank alone, the result is lost, and the group goes on.
    - A blocking call returns when its inputs are not read any more. With `async_op=True` it returns a `Work` at once.
    - `options` override the group's. `timeout` sets their `timeout_seconds`; `experimental_hints` is their deprecated
      name.
    - A value travels in at most 4096 packs; when arrays are cut or joined, each array is a pack of its own.
    - A plain `TypeError` or `ValueError` means wrong arguments of this rank alone: it has started nothing, and the
      others wait for it without a message. A `CollectiveError` means that a collective failed on all ranks, and its
      class says what to do next.
    """

    @overload
    def broadcast(
        self,
        value: None,
        root: int = 0,
        options: Options = None,
        *,
        async_op: Literal[True],
        **terms: Unpack[ResultTerms],
    ) -> Work[Any]: ...
    @overload
    def broadcast(
        self, value: T, root: int = 0, options: Options = None, *, async_op: Literal[True], **terms: Unpack[ResultTerms]
    ) -> Work[T]: ...
    @overload
    def broadcast(
        self,
        value: None,
        root: int = 0,
        options: Options = None,
        *,
        async_op: Literal[False] = False,
        **terms: Unpack[ResultTerms],
    ) -> Any: ...
    @overload
    def broadcast(
        self,
        value: T,
        root: int = 0,
        options: Options = None,
        *,
        async_op: Literal[False] = False,
        **terms: Unpack[ResultTerms],
    ) -> T: ...
    @overload
    def broadcast(
        self, value: T, root: int = 0, options: Options = None, *, async_op: bool, **terms: Unpack[ResultTerms]
    ) -> Any: ...
    def broadcast(
        self,
        value: Any,
        root: int = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        timeout: float | timedelta | None = None,
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
        operation = operations.broadcast(root, self.size)
        if value is None and operation.root != self.rank:
            value = ANY_VALUE
        if timeout is not None:
            options = with_timeout(options, timeout)
        return self._start(operation, value, options, experimental_hints, async_op, out)

    @overload
    def all_gather(
        self,
        value: T,
        axis: SupportsIndex = 0,
        options: Options = None,
        *,
        async_op: Literal[True],
        **terms: Unpack[ResultTerms],
    ) -> Work[T]: ...
    @overload
    def all_gather(
        self,
        value: T,
        axis: SupportsIndex = 0,
        options: Options = None,
        *,
        async_op: Literal[False] = False,
        **terms: Unpack[ResultTerms],
    ) -> T: ...
    @overload
    def all_gather(
        self,
        value: T,
        axis: SupportsIndex = 0,
        options: Options = None,
        *,
        async_op: bool,
        **terms: Unpack[ResultTerms],
    ) -> Any: ...
    def all_gather(
        self,
        value: Any,
        axis: SupportsIndex = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        timeout: float | timedelta | None = None,
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
            InvalidArgumentError: an array is 0-d on any rank: all ranks get the error.
            ValueError: an array has no such axis, or there are too many.
        """
        if timeout is not None:
            options = with_timeout(options, timeout)
        return self._start(operations.all_gather(axis), value, options, experimental_hints, async_op, out)

    @overload
    def gather(
        self,
        value: T,
        root: int = 0,
        axis: SupportsIndex = 0,
        options: Options = None,
        *,
        async_op: Literal[True],
        **terms: Unpack[ResultTerms],
    ) -> Work[T | None]: ...
    @overload
    def gather(
        self,
        value: T,
        root: int = 0,
        axis: SupportsIndex = 0,
        options: Options = None,
        *,
        async_op: Literal[False] = False,
        **terms: Unpack[ResultTerms],
    ) -> T | None: ...
    @overload
    def gather(
        self,
        value: T,
        root: int = 0,
        axis: SupportsIndex = 0,
        options: Options = None,
        *,
        async_op: bool,
        **terms: Unpack[ResultTerms],
    ) -> Any: ...
    def gather(
        self,
        value: Any,
        root: int = 0,
        axis: SupportsIndex = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        timeout: float | timedelta | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """As `all_gather`, but only `root` gets the result; the others get None, whatever `out` they give."""
        operation = operations.gather(root, axis, self.size)
        if timeout is not None:
            options = with_timeout(options, timeout)
        return self._start(operation, value, options, experimental_hints, async_op, out)

    @overload
    def scatter(
        self,
        value: Any,
        root: int = 0,
        axis: SupportsIndex = 0,
        sizes: Sizes = None,
        options: Options = None,
        *,
        async_op: Literal[True],
        **terms: Unpack[ResultTerms],
    ) -> Work[Any]: ...
    @overload
    def scatter(
        self,
        value: Any,
        root: int = 0,
        axis: SupportsIndex = 0,
        sizes: Sizes = None,
        options: Options = None,
        *,
        async_op: bool = False,
        **terms: Unpack[ResultTerms],
    ) -> Any: ...
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
        timeout: float | timedelta | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Cuts the arrays of `root` along `axis` and gives each rank its piece, the first one to rank 0.

        Args:
            value: on `root`, at most 4096 arrays of at least one axis and any dtype. On other ranks it is not looked
                at.
            axis: the same on all ranks.
            sizes: on `root`, how many rows each rank gets; they add up to the length of every array along `axis`.
                None: as even as possible, with the remainder on the first ranks. Not used on other ranks.

        Returns:
            This rank's piece, in the structure of root's value; on other ranks than `root` as NumPy arrays.

        Raises:
            ValueError: an array is 0-d, has no such axis, `sizes` do not add up to its length, or there are too many.
        """
        operation = operations.scatter(root, axis, (), self.size)
        if operation.root != self.rank:
            value = ANY_VALUE
        elif sizes is not None:
            operation = operations.scatter(root, axis, check_sizes(sizes, self.size), self.size)
        if timeout is not None:
            options = with_timeout(options, timeout)
        return self._start(operation, value, options, experimental_hints, async_op, out)

    @overload
    def all_to_all(
        self,
        value: T,
        axis: SupportsIndex = 0,
        sizes: Sizes = None,
        options: Options = None,
        *,
        async_op: Literal[True],
        **terms: Unpack[ResultTerms],
    ) -> Work[T]: ...
    @overload
    def all_to_all(
        self,
        value: T,
        axis: SupportsIndex = 0,
        sizes: Sizes = None,
        options: Options = None,
        *,
        async_op: Literal[False] = False,
        **terms: Unpack[ResultTerms],
    ) -> T: ...
    @overload
    def all_to_all(
        self,
        value: T,
        axis: SupportsIndex = 0,
        sizes: Sizes = None,
        options: Options = None,
        *,
        async_op: bool,
        **terms: Unpack[ResultTerms],
    ) -> Any: ...
    def all_to_all(
        self,
        value: Any,
        axis: SupportsIndex = 0,
        sizes: Iterable[SupportsIndex] | None = None,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        timeout: float | timedelta | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Cuts the arrays of every rank along `axis`, sends piece r to rank r, and joins the received pieces by sender.

        Args:
            value: at most 4096 arrays of at least one axis and any dtype; with `sizes`, lengths along `axis` may differ
                between ranks.
            sizes: how many of this rank's rows go to each rank; they add up to the length of every array along `axis`.
                Every rank gives its own, or none does. None: as even as possible, with the remainder on the first
                ranks.

        Returns:
            The structure of `value`: along `axis` the piece from rank 0, then that from rank 1, and so on.

        Raises:
            ValueError: an array is 0-d, has no such axis, `sizes` do not add up to its length, or there are too many.
        """
        operation = operations.all_to_all(axis, () if sizes is None else check_sizes(sizes, self.size))
        if timeout is not None:
            options = with_timeout(options, timeout)
        return self._start(operation, value, options, experimental_hints, async_op, out)

    @overload
    def barrier(self, options: Options = None, *, async_op: Literal[True], **terms: Unpack[Terms]) -> Work[None]: ...
    @overload
    def barrier(self, options: Options = None, *, async_op: Literal[False] = False, **terms: Unpack[Terms]) -> None: ...
    @overload
    def barrier(self, options: Options = None, *, async_op: bool, **terms: Unpack[Terms]) -> Any: ...
    def barrier(
        self,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Ends when all ranks have called it; None, or a `Work` with `async_op`."""
        if timeout is not None:
            options = with_timeout(options, timeout)
        return self._start(_BARRIER, None, options, experimental_hints, async_op)
