"""c10d's operations, each as collectives of a group of the service."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from collectived.integrations.c10d.arguments import (
    check_lengths,
    check_own_part,
    check_split,
    count_elements,
    is_even,
    listed,
    nested,
    read_options,
)
from collectived.integrations.c10d.membership import Membership
from collectived.integrations.c10d.reductions import Reduction, divide, plan_reduction, plan_sparse_reduction, scale
from collectived.integrations.c10d.submission import AnyWork
from collectived.integrations.c10d.tensors import Tensor, TensorTarget, carried_length, flatten, join, to_leaf
from collectived.integrations.c10d.work import Finish


class Operations(Membership):
    """Operations that process groups and backends of c10d share.

    Operations follow c10d: results are written into the tensors given; with `asyncOp` of their options, and without
    options, they return a Work in flight. Errors are `torch.distributed.DistBackendError`; its cause is the error of
    this library.
    """

    def allreduce(
        self, tensors: Sequence[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> AnyWork:
        return self._all_reduce(listed(tensors), read_options(c10d.AllreduceOptions, opts, timeout, reduceOp=op))

    allreduce_sparse = allreduce

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> AnyWork:
        return self._all_reduce(tensors, read_options(c10d.AllreduceCoalescedOptions, opts))

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> AnyWork:
        _check_not_empty(tensors)
        if tensors[0].layout is torch.sparse_coo:
            return self._all_reduce_sparse(tensors, opts)
        reduction = self._plan(tensors, opts)
        targets = [_target(tensor, reduction) for tensor in tensors]
        out = [target.leaf for target in targets]
        values = out
        if reduction.changes_values:
            values = [to_leaf(scale(flatten(tensor), reduction)) for tensor in tensors]

        def finish(_: object) -> None:
            for target in targets:
                divide(target.flat, reduction)
                target.settle()

        start = partial(self._group.all_reduce, reduction.op, _one_or_all(values), out=_one_or_all(out))
        return self._submission.run([start], finish, tensors, opts)

    def _all_reduce_sparse(self, tensors: Sequence[Tensor], opts: Any) -> AnyWork:
        (tensor,) = tensors
        reduction = plan_sparse_reduction(opts.reduceOp, tensor.dtype, self._size)
        own = tensor.coalesce()
        rows, dense = own.indices().t().contiguous(), scale(own.values(), reduction)

        def finish(results: list[Any]) -> None:
            indices, values = (torch.as_tensor(part, device=tensor.device) for part in results[0])
            made = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
            divide(made._values(), reduction)
            tensor.copy_(made.to(tensor.dtype))

        start = partial(self._group.all_gather, [rows, dense])
        return self._submission.run([start], finish, tensors, opts)

    def broadcast(
        self,
        tensors: Sequence[Tensor] | Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> AnyWork:
        opts = read_options(c10d.BroadcastOptions, opts, timeout, rootRank=root)
        (tensor,) = tensors = listed(tensors)
        target = TensorTarget.of(tensor)
        start = partial(self._group.broadcast, target.leaf, opts.rootRank, out=target.leaf)
        return self._submission.run([start], _settle(target), tensors, opts)

    def reduce(
        self,
        tensors: Sequence[Tensor] | Tensor,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> AnyWork:
        opts = read_options(c10d.ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
        (tensor,) = tensors = listed(tensors)
        reduction = self._plan(tensors, opts)
        target = _target(tensor, reduction)
        value = to_leaf(scale(flatten(tensor), reduction)) if reduction.changes_values else target.leaf

        def finish(_: object) -> None:
            if self._rank == opts.rootRank:
                divide(target.flat, reduction)
                target.settle()

        start = partial(self._group.reduce, reduction.op, value, opts.rootRank, out=target.leaf)
        return self._submission.run([start], finish, tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *, timeout: timedelta | None = None) -> AnyWork:
        outputs, inputs = nested(outputs, inputs)
        return self._all_gather(outputs, inputs, read_options(c10d.AllgatherOptions, opts, timeout), outputs)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> AnyWork:
        by_input = [[row[number] for row in outputs] for number in range(len(inputs))]
        return self._all_gather(by_input, inputs, opts, outputs)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> AnyWork:
        return self._all_gather([[output]], [source], opts, [output])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> AnyWork:
        return self._all_gather([[output] for output in outputs], inputs, opts, outputs)

    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced

    def _all_gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any, result: Any
    ) -> AnyWork:
        """Rows where all ranks give as much: the service compares their lengths. Else these are gathered too."""
        opts = read_options(c10d.AllgatherOptions, opts)
        flats = [flatten(tensor) for tensor in inputs]
        targets = [TensorTarget.joined(row) for row in outputs]
        pairs = list(zip(flats, targets, strict=True))
        if all(is_even(row, flat.numel(), self._size) for row, flat in zip(outputs, flats, strict=True)):
            values = [to_leaf(flat.view(1, -1) if flat.numel() else flat.view(1, 0)) for flat in flats]
            out = [target.leaf.reshape(self._size, flat.numel()) for flat, target in pairs]
            start = partial(self._group.all_gather, _one_or_all(values), out=_one_or_all(out))
            return self._submission.run([start], _settle(*targets), result, opts)
        own = torch.tensor([[flat.numel() for flat in flats]], device=flats[0].device)
        lengths = own.new_empty((self._size, len(flats)))

        def finish(_: object) -> None:
            for row, given in zip(outputs, lengths.t().tolist(), strict=True):
                check_lengths(row, given)
            for target in targets:
                target.settle()

        out = [*(target.leaf for target in targets), to_leaf(lengths)]
        start = partial(self._group.all_gather, [*map(to_leaf, flats), to_leaf(own)], out=out)
        return self._submission.run([start], finish, result, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> AnyWork:
        """Gather, with the lengths of all ranks: only the root knows whether they are equal."""
        opts = read_options(c10d.GatherOptions, opts, timeout)
        outputs, inputs = nested(outputs, inputs)
        flat = flatten(inputs[0])
        value = [to_leaf(flat), to_leaf(torch.tensor([flat.numel()], device=flat.device))]
        if self._rank != opts.rootRank:
            return self._submission.run([partial(self._group.gather, value, opts.rootRank)], None, outputs, opts)
        target = TensorTarget.joined(outputs[0])
        lengths = torch.empty(self._size, dtype=torch.int64, device=flat.device)

        def finish(_: object) -> None:
            check_lengths(outputs[0], lengths.tolist())
            target.settle()

        start = partial(self._group.gather, value, opts.rootRank, out=[target.leaf, to_leaf(lengths)])
        return self._submission.run([start], finish, outputs, opts)

    def gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> AnyWork:
        return self.gather([[output]], [source], opts)

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> AnyWork:
        opts = read_options(c10d.ScatterOptions, opts, timeout)
        inputs, outputs = nested(inputs, outputs)
        target = TensorTarget.of(outputs[0])
        value, sizes = None, None
        if self._rank == opts.rootRank:
            flat, sizes = join(inputs[0])
            value = to_leaf(flat)
        start = partial(self._group.scatter, value, opts.rootRank, sizes=sizes, out=target.leaf)
        return self._submission.run([start], _settle(target), outputs, opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> AnyWork:
        opts = read_options(c10d.ReduceScatterOptions, opts, timeout, reduceOp=op)
        inputs, outputs = nested(inputs, outputs)
        return self._reduce_scatter(outputs, [join(parts) for parts in inputs], opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> AnyWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> AnyWork:
        parts = [(flatten(tensor), [tensor.numel() // self._size] * self._size) for tensor in inputs]
        return self._reduce_scatter(outputs, parts, opts)

    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[tuple[Tensor, list[int]]], opts: Any
    ) -> AnyWork:
        """One collective for all inputs that are cut alike."""
        opts = read_options(c10d.ReduceScatterOptions, opts)
        reduction = self._plan(outputs, opts)
        targets = [_target(output, reduction) for output in outputs]
        alike: dict[tuple[int, ...], list[tuple[Any, Any]]] = {}
        for (flat, sizes), target in zip(inputs, targets, strict=True):
            value = to_leaf(scale(flatten(flat, reduction.as_bytes), reduction))
            alike.setdefault(tuple(sizes), []).append((value, target.leaf))
        starts = [
            partial(
                self._group.reduce_scatter,
                reduction.op,
                _one_or_all([value for value, _ in pairs]),
                sizes=sizes,
                out=_one_or_all([leaf for _, leaf in pairs]),
            )
            for sizes, pairs in alike.items()
        ]

        def finish(_: object) -> None:
            for target in targets:
                divide(target.flat, reduction)
                target.settle()

        return self._submission.run(starts, finish, outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> AnyWork:
        """Sizes are rows; where a rank gives none, its rows are dealt evenly."""
        rows = source.shape[0] if source.dim() else 1
        out_rows = output.shape[0] if output.dim() else 1
        check_split(input_sizes, rows, self._size)
        check_split(output_sizes, out_rows, self._size)
        flat, target = flatten(source), TensorTarget.of(output)
        sizes = count_elements(input_sizes, flat.numel(), rows, self._size)
        rooms = count_elements(output_sizes, carried_length(output), out_rows, self._size)
        return self._all_to_all(flat, sizes, rooms, target, [output], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> AnyWork:
        flat, sizes = join(inputs)
        target = TensorTarget.joined(outputs)
        rooms = [carried_length(output) for output in outputs]
        return self._all_to_all(flat, sizes, rooms, target, outputs, opts)

    def _all_to_all(
        self, flat: Tensor, sizes: list[int], rooms: list[int], target: TensorTarget, result: Any, opts: Any
    ) -> AnyWork:
        def finish(_: object) -> None:
            check_own_part(self._rank, sizes, rooms)  # here, where this rank has done its part: no rank waits for it
            target.settle()

        start = partial(self._group.all_to_all, to_leaf(flat), sizes=sizes, out=target.leaf)
        return self._submission.run([start], finish, result, read_options(c10d.AllToAllOptions, opts))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> AnyWork:
        return self._submission.run([self._group.barrier], None, [], read_options(c10d.BarrierOptions, opts, timeout))

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> AnyWork:
        return self._submission.send(to_leaf(flatten(tensors[0])), to, tag, tensors)

    def recv(self, tensors: Sequence[Tensor], source: int | None, tag: int = 0) -> AnyWork:
        (tensor,) = tensors
        target = TensorTarget.of(tensor)
        return self._submission.receive(target.leaf, source, tag, _settle(target), tensors)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> AnyWork:
        return self.recv(tensors, None, tag)

    def _plan(self, tensors: Sequence[Tensor], opts: Any) -> Reduction:
        _check_not_empty(tensors)
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise TypeError(f"tensors of one reduction must have one dtype, got {', '.join(sorted(map(str, dtypes)))}")
        return plan_reduction(opts.reduceOp, tensors[0].dtype, self._size)


def _target(tensor: Tensor, reduction: Reduction) -> TensorTarget:
    return TensorTarget.wide(tensor) if reduction.is_wide else TensorTarget.of(tensor, reduction.as_bytes)


def _check_not_empty(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise ValueError("expected at least one tensor to reduce, got none: leave the call out on all ranks")


def _one_or_all(leaves: list[Any]) -> Any:
    return leaves[0] if len(leaves) == 1 else leaves


def _settle(*targets: TensorTarget) -> Finish | None:
    """Return a function that copies results into their tensors; None where all lie there already."""
    copied = [target for target in targets if not target.is_in_place]

    def settle(_: object) -> None:
        for target in copied:
            target.settle()

    return settle if copied else None
