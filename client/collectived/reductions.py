"""The collectives of a group that combine values, as users call them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal, SupportsIndex, TypeVar, Unpack, overload

from collectived import operations
from collectived.arguments import REQUIRED, Options, ResultTerms, refuse_single, with_timeout
from collectived.calls.prepare import CrossDeviceTerms
from collectived.point_to_point import PointToPointCalls
from collectived.values.axes import check_sizes
from collectived.work import Work
from collectived_proto.options import CommunicationOptions
from collectived_proto.types import Packing, ReduceOp, Tier

T = TypeVar("T")
Op = ReduceOp | str
Sizes = Iterable[SupportsIndex] | None


class Reductions(PointToPointCalls):
    """`Collectives` has the rules for these."""

    @overload
    def all_reduce(
        self, reduce_op: Op, value: T, options: Options = None, *, async_op: Literal[True], **terms: Unpack[ResultTerms]
    ) -> Work[T]: ...
    @overload
    def all_reduce(
        self,
        reduce_op: Op,
        value: T,
        options: Options = None,
        *,
        async_op: Literal[False] = False,
        **terms: Unpack[ResultTerms],
    ) -> T: ...
    @overload
    def all_reduce(
        self, reduce_op: Op, value: T, options: Options = None, *, async_op: bool, **terms: Unpack[ResultTerms]
    ) -> Any: ...
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any = REQUIRED,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        timeout: float | timedelta | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Combines the values of all ranks, element by element; every rank gets the same bits.

        Args:
            reduce_op: `"sum"`, `"mean"` or another `ReduceOp`; the mean of integers is floating.
            value: the same structure, shapes and dtypes on all ranks; no bool, and what has no order has no minimum.
                Of `IndexedSlices` every rank gets the rows of all, in order of rank, as many as each has: their sum, or
                with `"mean"` divided by the number of ranks.
            options: for this call, over the group's.
            async_op: return a `Work` at once.
            out: a nest of the same structure whose arrays take the result; may be `value` itself.
            timeout: seconds, the same as `options` with that `timeout_seconds`.
            experimental_hints: deprecated name of `options`.

        Returns:
            `out`, or the result in the structure of `value`: arrays of their own, or, for large NumPy arrays from
            `session.empty` in groups of several workers, read-only views that ranks of a host share. With `async_op`,
            a `Work`.

        Raises:
            TypeError, ValueError: an argument is wrong.
            CollectiveError: the collective failed; the class says what to do next.
        """
        if value is REQUIRED:
            refuse_single("all_reduce")
        if timeout is not None:
            options = with_timeout(options, timeout)
        return self._start(operations.all_reduce(reduce_op), value, options, experimental_hints, async_op, out)

    @overload
    def reduce(
        self,
        reduce_op: Op,
        value: T,
        root: int = 0,
        options: Options = None,
        *,
        async_op: Literal[True],
        **terms: Unpack[ResultTerms],
    ) -> Work[T | None]: ...
    @overload
    def reduce(
        self,
        reduce_op: Op,
        value: T,
        root: int = 0,
        options: Options = None,
        *,
        async_op: Literal[False] = False,
        **terms: Unpack[ResultTerms],
    ) -> T | None: ...
    @overload
    def reduce(
        self,
        reduce_op: Op,
        value: T,
        root: int = 0,
        options: Options = None,
        *,
        async_op: bool,
        **terms: Unpack[ResultTerms],
    ) -> Any: ...
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any = REQUIRED,
        root: int = 0,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        timeout: float | timedelta | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """As `all_reduce`, but only `root` gets the result; the others get None, whatever `out` they give."""
        if value is REQUIRED:
            refuse_single("reduce")
        operation = operations.reduce(reduce_op, root, self.size)
        if timeout is not None:
            options = with_timeout(options, timeout)
        return self._start(operation, value, options, experimental_hints, async_op, out)

    @overload
    def reduce_scatter(
        self,
        reduce_op: Op,
        value: T,
        axis: SupportsIndex = 0,
        sizes: Sizes = None,
        options: Options = None,
        *,
        async_op: Literal[True],
        **terms: Unpack[ResultTerms],
    ) -> Work[T]: ...
    @overload
    def reduce_scatter(
        self,
        reduce_op: Op,
        value: T,
        axis: SupportsIndex = 0,
        sizes: Sizes = None,
        options: Options = None,
        *,
        async_op: Literal[False] = False,
        **terms: Unpack[ResultTerms],
    ) -> T: ...
    @overload
    def reduce_scatter(
        self,
        reduce_op: Op,
        value: T,
        axis: SupportsIndex = 0,
        sizes: Sizes = None,
        options: Options = None,
        *,
        async_op: bool,
        **terms: Unpack[ResultTerms],
    ) -> Any: ...
    def reduce_scatter(
        self,
        reduce_op: ReduceOp | str,
        value: Any = REQUIRED,
        axis: SupportsIndex = 0,
        sizes: Iterable[SupportsIndex] | None = None,
        options: CommunicationOptions | None = None,
        *,
        async_op: bool = False,
        out: Any = None,
        timeout: float | timedelta | None = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Combines the values of all ranks as `all_reduce` does, and gives each rank its piece along `axis`.

        Args:
            reduce_op: `"sum"`, `"mean"` or another `ReduceOp`; the mean of integers is floating.
            value: at most 4096 arrays of at least one axis; the same structure, shapes and dtypes on all ranks; no
                bool.
            sizes: how many rows each rank gets, the same on all ranks; they add up to the length of every array along
                `axis`. None: as even as possible, with the remainder on the first ranks.

        Returns:
            The structure of `value`, with this rank's rows.

        Raises:
            ValueError: an array is 0-d, has no such axis, `sizes` do not add up to its length, or there are too many.
        """
        if value is REQUIRED:
            refuse_single("reduce_scatter")
        rows = () if sizes is None else check_sizes(sizes, self.size)
        operation = operations.reduce_scatter(reduce_op, axis, rows)
        if timeout is not None:
            options = with_timeout(options, timeout)
        return self._start(operation, value, options, experimental_hints, async_op, out)

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
        return self._start(operations.all_reduce(reduce_op), value, options, None, async_op, special=special)
